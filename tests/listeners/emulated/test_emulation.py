"""An emulated GPU under one rank: what its instructions take, and the time between iterations."""

from dataclasses import replace

import pytest

from lightning_pfo.core.events import InstructionListener, InstructionWork
from lightning_pfo.device import ClusterConfig, EmulatedGpu, load_gpu_config
from lightning_pfo.listeners.emulated.emulation import EmulationListener
from tests.listeners.fakes import FakeSource

WORK = InstructionWork(1e6, 1e4, sent_bytes=1e3)
CONFIG = load_gpu_config("emulated_a100")


class Moments(InstructionListener):
    """Notes when a listener between sees iterations begin and end."""

    def __init__(self, time_source):
        self.time_source, self.seen_s = time_source, []

    def on_iteration_begin(self, iteration):
        self.seen_s.append(self.time_source.now_s())

    on_iteration_end = on_iteration_begin


def test_the_first_iteration_counts_and_the_others_take_their_modelled_time():
    source, gpu = FakeSource(num_microbatches=3), EmulatedGpu(CONFIG)
    emulation = EmulationListener(gpu, source, ClusterConfig())
    emulation.attach()
    assert source.counting
    source.run_iteration(work=WORK)
    assert gpu.time_source.now_s() == 0
    assert emulation.ready
    source.run_iteration(work=WORK)
    assert gpu.time_source.now_s() == pytest.approx(6 * CONFIG.forward_s)
    power_w = gpu.physics.computing_power_w(CONFIG.top_clock_mhz)
    assert gpu.total_energy_mj() / 1000 == pytest.approx(6 * CONFIG.forward_s * power_w)
    emulation.detach()
    assert not source.counting
    source.run_iteration(work=WORK)
    assert gpu.time_source.now_s() == pytest.approx(6 * CONFIG.forward_s)


@pytest.mark.parametrize("time_scale", [1.0, 0.1])
def test_the_optimizer_and_the_next_batch_take_time_between_iterations_at_idle_power(time_scale):
    config = replace(CONFIG, time_scale=time_scale)
    source, gpu = FakeSource(num_microbatches=3), EmulatedGpu(config)
    emulation = EmulationListener(gpu, source, ClusterConfig(optimizer_s=0.5, data_s=0.25))
    emulation.attach()
    source.add_listener(moments := Moments(gpu.time_source))
    for _ in range(3):
        source.run_iteration(work=WORK)
    # of the first iteration, which counts; then six instructions, the time between, six instructions
    busy_s, between_s = 6 * CONFIG.forward_s * time_scale, 0.75 * time_scale
    assert moments.seen_s == pytest.approx([0, 0, 0, busy_s, busy_s + between_s, 2 * busy_s + between_s])
    busy_j = 2 * busy_s * gpu.physics.computing_power_w(CONFIG.top_clock_mhz)
    assert gpu.total_energy_mj() / 1000 == pytest.approx(busy_j + between_s * CONFIG.idle_power_w)


def test_in_real_time_instructions_take_their_time_and_all_else_what_it_takes():
    config = replace(CONFIG, time="real", forward_s=0.005)
    source, gpu = FakeSource(num_microbatches=2), EmulatedGpu(config)
    emulation = EmulationListener(gpu, source, ClusterConfig(optimizer_s=1e9))
    emulation.attach()
    source.add_listener(moments := Moments(gpu.time_source))
    for _ in range(2):
        source.run_iteration(work=WORK)
    assert moments.seen_s[3] - moments.seen_s[2] >= 4 * 0.005
    emulation.detach()
