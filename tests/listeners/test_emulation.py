import pytest
from lightning_pfo.listeners.emulation import EmulationListener

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionWork
from lightning_pfo.device import EmulatedGpu, load_gpu_config
from lightning_pfo.listeners.gpu_session import open_session
from tests.device.fake_clock import FakeClock
from tests.listeners.fakes import FakeSource


def test_the_first_iteration_counts_and_the_others_take_their_modelled_time():
    source = FakeSource(num_microbatches=3)
    clock = FakeClock()
    gpu = EmulatedGpu(load_gpu_config("emulated_a100"), time_source=clock)
    emulation = EmulationListener(gpu, source)
    emulation.attach()
    assert source.counting
    source.run_iteration(work=InstructionWork(1e6, 1e4))
    assert clock.now_s() == 0
    assert emulation.ready
    source.run_iteration(work=InstructionWork(1e6, 1e4))
    assert clock.now_s() == pytest.approx(6 * gpu.config.forward_s)
    power_w = gpu.physics.computing_power_w(gpu.config.top_clock_mhz)
    assert gpu.total_energy_mj() / 1000 == pytest.approx(6 * gpu.config.forward_s * power_w, rel=1e-3)
    emulation.detach()
    assert not source.counting


def test_one_gpu_is_shared_and_closed_after_its_last_user():
    source = FakeSource()
    one, two = object(), object()
    session = open_session(source, "emulated_a40", one, num_gpus=1)
    assert open_session(source, "emulated_a40", two, num_gpus=1) is session
    with pytest.raises(ConfigurationError, match=r"gpu='nvml', another callback gpu='emulated_a40'"):
        open_session(source, "nvml", two, num_gpus=1)
    session.own_clocks(one)
    with pytest.raises(ConfigurationError, match="One callback sets the clocks"):
        session.own_clocks(two)
    session.release(one)
    session.own_clocks(two)
    assert source.counting
    session.release(two)
    session.release(two)
    assert not source.counting
    assert open_session(source, "emulated_a100", one, num_gpus=1) is not session
