import math
import random

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.events import InstructionListener
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.listeners.meters.instructions import InstructionMeter, mean_and_stderr
from tests.listeners.fakes import FakeSource


def test_computing_and_waiting_are_told_apart(world):
    meter = InstructionMeter(world.gpu, world.source)

    class Waits(InstructionListener):
        def on_instruction_begin(self, event):
            world.spend(0.5, 80)

    world.source.add_listener(Waits())
    world.source.add_listener(meter)
    world.source.run_iteration(lambda inst: world.spend(0.1 if inst.type.value == "F" else 0.2, 300))
    forward = meter.instructions[0, InstructionType.FORWARD]
    backward = meter.instructions[0, InstructionType.BACKWARD]
    assert forward.times_s == pytest.approx([0.1, 0.1])
    assert forward.energies_j == pytest.approx([30, 30])
    assert backward.times_s == pytest.approx([0.2, 0.2])
    assert meter.blocked_power().power_w == pytest.approx(80)
    meter.reset()
    assert not meter.instructions
    assert math.isnan(meter.blocked_power().power_w)
    meter.close()


def test_mean_and_standard_error():
    assert mean_and_stderr([2.0]) == (2.0, 0.0)
    assert mean_and_stderr([1.0, 3.0]) == (2.0, 1.0)
    assert mean_and_stderr([5.0] * 4 + [900.0] + [5.0] * 4 + [-900.0]) == (5.0, 0.0)


@pytest.fixture(params=[0.0, 0.015])
def ticking_meter(request):
    """An emulated GPU whose counter ticks every 20 ms, and may lag, while instructions take 4 to 8 ms."""
    counter = {"counter_tick_s": 0.02, "counter_lag_s": request.param}
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0, throttle_clock_mhz=1200, **counter))
    meter = InstructionMeter(gpu, FakeSource(num_microbatches=8))
    yield meter
    meter.close()


def test_energy_is_attributed_although_the_counter_ticks_slowly(ticking_meter):
    gpu, source = ticking_meter._gpu, ticking_meter._source
    chance = random.Random(1)

    class Waits(InstructionListener):
        def on_instruction_begin(self, event):
            gpu.set_waiting("blocked")
            gpu.time_source.sleep(chance.uniform(0, 0.008))

        def on_instruction_end(self, event):
            gpu.set_waiting("idle")

    def compute(instruction):
        gpu.begin_work()
        gpu.finish_work(0.004 if instruction.type is InstructionType.FORWARD else 0.008, 0.0)

    source.add_listener(Waits())
    source.add_listener(ticking_meter)
    for _ in range(8):
        source.run_iteration(compute)
    measured = ticking_meter.measured()
    power_w = gpu.physics.computing_power_w(1200)
    for kind in (InstructionType.FORWARD, InstructionType.BACKWARD):
        result = measured[0, kind]
        assert result.samples == 64
        assert result.energy_j / result.time_s == pytest.approx(power_w, rel=0.005)
        assert result.seen.limits == {"thermal"}
        assert result.seen.clock_mhz == 1200
    waiting = ticking_meter.blocked_power()
    true_w = gpu.physics.blocked_power_w(1200)
    assert waiting.power_w == pytest.approx(true_w, rel=0.01)
    assert 0 < abs(waiting.power_w - true_w) < 2 * waiting.stderr_w
    assert 0 < ticking_meter.energy_error() < 0.03


def test_too_few_ticks_are_an_error_that_says_what_to_do():
    gpu = EmulatedGpu(GpuConfig(kind="emulated", counter_tick_s=30.0))
    meter = InstructionMeter(gpu, FakeSource())
    meter._source.add_listener(meter)
    meter._source.run_iteration(lambda inst: gpu.time_source.sleep(0.002))
    with pytest.raises(DeviceError, match=r"had 1 in .* too few for 2 of 2 kinds .* more iterations_per_clock"):
        meter.measured()
    assert meter.energy_error() == math.inf
    meter.close()
