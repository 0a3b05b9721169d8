"""What is noted beside the training: by a thread in real time, in step in virtual time."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise

import pytest

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.energy.sampler import EnergySampler, GpuState, state_within
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.waiting import wait_until

__all__ = ["fake_driver"]


class Counting(EmulatedGpu):
    """Counts how often its energy is read."""

    num_reads = 0

    def total_energy_mj(self) -> float:
        self.num_reads += 1
        return super().total_energy_mj()


class Old(EmulatedGpu):
    def total_energy_mj(self) -> float:
        raise NotSupportedError("Older than Volta.")


def test_ticks_are_seen_with_their_energy() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", counter_tick_s=0.02, idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    sampler.start()
    gpu.time_source.sleep(0.25)
    sampler.stop()
    sampler.stop()
    trace = sampler.trace(0.0)
    assert len(trace.times_s) == 12
    for number, (time_s, energy_j) in enumerate(zip(trace.times_s, trace.energies_j, strict=True), start=1):
        assert time_s == pytest.approx(0.02 * number, abs=0.0011)  # half the time between two polls
        assert energy_j == pytest.approx(60 * 0.02 * number, abs=0.001)  # whole millijoules
    assert sampler.trace(trace.times_s[-1] + 1).times_s == ()
    gpu.time_source.sleep(1)
    assert sampler.trace(0.0) == trace  # nobody looks any more


def test_in_real_time_a_thread_sees_the_ticks_with_their_energy() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", time="real", counter_tick_s=0.02, idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    sampler.start()
    wait_until(lambda: len(sampler.trace(0.0).times_s) >= 10)
    sampler.stop()
    sampler.stop()
    trace = sampler.trace(0.0)
    # on a busy machine the thread sees a tick late, and may miss some
    numbers = [energy_j / (60 * 0.02) for energy_j in trace.energies_j]
    assert numbers == pytest.approx([round(number) for number in numbers], abs=0.01)
    for many in (numbers, trace.times_s):
        assert all(one < other for one, other in pairwise(many))
    assert numbers[-1] <= (gpu.time_source.now_s() - gpu._start_s) / 0.02
    assert sampler.trace(trace.times_s[-1] + 1).times_s == ()
    assert sampler._task is not None
    assert not sampler._task.is_running


@pytest.mark.parametrize(("call_s", "tick_s"), [(0.006, 0.1), (0.006, 0.03), (0.012, 0.1)])
def test_ticks_are_used_where_calls_take_long(call_s: float, tick_s: float) -> None:
    class Slow(EmulatedGpu):
        def total_energy_mj(self) -> float:
            self.time_source.sleep(call_s / 2)
            energy_mj = super().total_energy_mj()
            self.time_source.sleep(call_s / 2)
            return energy_mj

    gpu = Slow(GpuConfig(kind="emulated", counter_tick_s=tick_s, idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(40 * tick_s)
    sampler.stop()
    trace = sampler.trace(0.0)
    assert len(trace.times_s) > 35
    for time_s, energy_j in zip(trace.times_s, trace.energies_j, strict=True):
        assert time_s == pytest.approx(energy_j / 60, abs=2 * trace.resolution_s)
    assert trace.resolution_s < 0.003


def test_it_sleeps_between_ticks() -> None:
    gpu = Counting(GpuConfig(kind="emulated", counter_tick_s=0.1))
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(1.0)
    sampler.stop()
    assert len(sampler.trace(0.0).times_s) == 10
    assert gpu.num_reads < 1.0 / 0.002 / 2  # half of what steady polling would need; the first two ticks are polled for


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_without_a_counter_power_is_integrated(time: str) -> None:
    gpu = Old(GpuConfig(kind="emulated", time=time, idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    assert sampler.wait_for_reading_after(gpu.time_source.now_s() + 0.1, 60)
    sampler.stop()
    trace = sampler.trace(0.0)
    passed_s = trace.times_s[-1] - trace.times_s[0]
    assert passed_s >= 0.1 - 1e-9
    assert trace.energies_j[-1] - trace.energies_j[0] == pytest.approx(60 * passed_s)


class Stuck(EmulatedGpu):
    """A counter that answers but does not advance before a moment."""

    from_s = math.inf

    def total_energy_mj(self) -> float:
        return 5000 + 60_000 * max(self.time_source.now_s() - self.from_s, 0.0)


def test_where_the_counter_never_advances_power_is_integrated(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Stuck(GpuConfig(kind="emulated", idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(0.9)
    assert sampler.energy_now_j() == 5
    gpu.time_source.sleep(1.1)
    sampler.stop()
    trace = sampler.trace(0.0)
    assert 1.0 <= trace.times_s[0] < 1.01
    assert trace.energies_j[0] == 5
    assert trace.energies_j[-1] - 5 == pytest.approx(60 * (trace.times_s[-1] - trace.times_s[0]))
    assert sampler.energy_now_j() == pytest.approx(65, abs=1)
    (record,) = caplog.records
    assert "has not advanced in 1 s: its power is integrated from now on" in record.getMessage()


class Stops(EmulatedGpu):
    """A counter of ticks that stops at a moment."""

    def total_energy_mj(self) -> float:
        return 60_000 * min(self.time_source.now_s() // 0.1 * 0.1, 2.0)


def test_where_the_counter_stops_advancing_power_is_integrated(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Stops(GpuConfig(kind="emulated", idle_power_w=60))
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(2.5)
    assert not caplog.records
    gpu.time_source.sleep(2.5)
    assert sampler.energy_now_j() == pytest.approx(60 * 5.0, rel=0.03)
    trace = sampler.trace(3.5)
    assert trace.energies_j[-1] - trace.energies_j[0] == pytest.approx(60 * (trace.times_s[-1] - trace.times_s[0]))
    sampler.stop()
    (record,) = caplog.records
    assert "has not advanced in 1 s: its power is integrated from now on" in record.getMessage()


def test_a_counter_that_ticks_rarely_has_not_stopped(caplog: pytest.LogCaptureFixture) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", idle_power_w=60, counter_tick_s=0.9))
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(20)
    sampler.stop()
    assert sampler.tick_s == pytest.approx(0.9, abs=0.01)
    assert not caplog.records


def test_a_counter_that_advances_late_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    gpu = Stuck(GpuConfig(kind="emulated", idle_power_w=60))
    gpu.from_s = 0.9
    sampler = EnergySampler(gpu)
    sampler.start()
    gpu.time_source.sleep(3)
    sampler.stop()
    assert sampler.energy_now_j() == pytest.approx(5 + 60 * 2.1, rel=0.01)
    assert not caplog.records


def test_in_virtual_time_a_reading_is_waited_for_by_letting_time_pass() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", counter_tick_s=0.1))
    sampler = EnergySampler(gpu)
    sampler.start()
    assert sampler.wait_for_reading_after(0.25, 60)
    assert gpu.time_source.now_s() == pytest.approx(0.3, abs=0.004)
    assert not sampler.wait_for_reading_after(1000.0, 0.5)
    assert gpu.time_source.now_s() == pytest.approx(0.8, abs=0.008)
    sampler.stop()


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_a_lost_gpu_ends_the_sampling_with_one_warning(time: str, caplog: pytest.LogCaptureFixture) -> None:
    class Lost(EmulatedGpu):
        def total_energy_mj(self) -> float:
            raise DeviceError("Fallen off the bus.")

    gpu = Lost(GpuConfig(kind="emulated", time=time))
    sampler = EnergySampler(gpu)
    sampler.start()
    wait_until(lambda: sampler.error is not None)
    assert not sampler.wait_for_reading_after(0.0, 60)
    sampler.stop()
    assert [record.getMessage() for record in caplog.records] == [
        f"Energy of {gpu.name} is not measured any more. Fallen off the bus."
    ]


@pytest.mark.parametrize(
    ("options", "limit"), [({"throttle_clock_mhz": 900}, "thermal"), ({"power_limit_w": 200.0}, "power_cap")]
)
def test_a_gpu_that_is_held_back_says_why(options: dict[str, float], limit: str) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", **options))  # type: ignore[arg-type]
    sampler = EnergySampler(gpu, with_energy=False)
    sampler.start()
    gpu.time_source.sleep(0.05)
    begin_s = gpu.time_source.now_s()
    gpu.begin_work()
    gpu.finish_work(0.1, 0.0)
    end_s = gpu.time_source.now_s()
    sampler.stop()
    states = sampler.states(begin_s)
    assert [state.time_s for state in states] == pytest.approx([0.02 * n for n in range(3, 3 + len(states))])
    assert len(states) >= 5
    seen = state_within(sampler.states(0.0), [(begin_s, end_s)])
    assert seen.limits == {limit}
    assert seen.clock_mhz < 1400
    assert (seen.temperature_c > 36, seen.power_w > 100) == (True, True)  # it idles at 36 degrees, 60 W
    assert sampler.trace(0.0).times_s == ()


def test_clock_and_limits_within_intervals() -> None:
    states = [GpuState(float(i), 1000 + i, frozenset({"thermal"} if i == 4 else ()), 50.0 + i) for i in range(10)]
    seen = state_within(states, [(1.5, 2.5), (4.0, 5.0)])
    assert (seen.clock_mhz, seen.limits) == ((1002 + 1004 + 1005) / 3, {"thermal"})
    seen = state_within(states, [(0.0, 1.0)])
    assert (seen.clock_mhz, seen.limits, seen.temperature_c) == (1000.5, set(), 50.5)
    assert state_within(states, [(0.0, 20.0)]).limits == {"thermal"}
    assert state_within([*states, *states[5:] * 20], [(0.0, 20.0)]).limits == set()  # seen, but seldom
    seen = state_within(states, [(20.0, 21.0)])
    assert math.isnan(seen.clock_mhz)
    assert seen.limits == set()


@pytest.mark.parametrize(
    ("bits", "limits"), [("0x0", []), ("0x4", ["power_cap"]), ("0x68", ["hw_slowdown", "thermal"]), ("0x1", [])]
)
def test_limits_of_a_real_gpu(bits: str, limits: list[str], fake_driver: FakeDriver) -> None:
    script = "from lightning_pfo.device import open_gpu; print(sorted(open_gpu('nvml', 0).clock_limits()))"
    environment = fake_driver.environment() | {"FAKE_NVML_REASONS": bits}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(limits)
