from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from lightning_pfo.core.errors import DeviceError, NotSupportedError
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.config import GpuConfig
from lightning_pfo.device.energy.sampler import EnergySampler, GpuState, clock_within
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.waiting import wait_until

__all__ = ["fake_driver"]


def ticking_gpu(tick_s: float = 0.02) -> EmulatedGpu:
    return EmulatedGpu(GpuConfig(kind="emulated", counter_tick_s=tick_s, idle_power_w=60))


def test_ticks_are_seen_with_their_energy() -> None:
    gpu = ticking_gpu()
    sampler = EnergySampler(gpu)
    sampler.start()
    sampler.start()
    wait_until(lambda: len(sampler.trace(0.0).times_s) >= 10)
    sampler.stop()
    sampler.stop()
    trace = sampler.trace(0.0)
    start_s = gpu._start_s
    for time_s, energy_j in zip(trace.times_s, trace.energies_j, strict=True):
        assert energy_j == pytest.approx(60 * 0.02 * round((time_s - start_s) / 0.02), abs=0.01)
    assert sampler.trace(trace.times_s[-1] + 1).times_s == ()
    assert sampler._thread is not None
    assert not sampler._thread.is_alive()


def test_it_sleeps_between_ticks() -> None:
    class Counting(EmulatedGpu):
        num_reads = 0

        def total_energy_mj(self) -> int:
            self.num_reads += 1
            return super().total_energy_mj()

    gpu = Counting(GpuConfig(kind="emulated", counter_tick_s=0.1))
    sampler = EnergySampler(gpu)
    sampler.start()
    wait_until(lambda: len(sampler.trace(0.0).times_s) >= 8)
    sampler.stop()
    assert gpu.num_reads < (time.perf_counter() - gpu._start_s) / 0.002 / 2  # half of what steady polling would need


def test_without_a_counter_power_is_integrated() -> None:
    class Old(EmulatedGpu):
        def total_energy_mj(self) -> int:
            raise NotSupportedError("Older than Volta.")

    sampler = EnergySampler(Old(GpuConfig(kind="emulated", idle_power_w=60)))
    sampler.start()
    assert sampler.wait_for_reading_after(time.perf_counter() + 0.1, 60)
    sampler.stop()
    trace = sampler.trace(0.0)
    passed_s = trace.times_s[-1] - trace.times_s[0]
    assert trace.energies_j[-1] - trace.energies_j[0] == pytest.approx(60 * passed_s)


def test_a_lost_gpu_ends_the_sampling_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Lost(EmulatedGpu):
        def total_energy_mj(self) -> int:
            raise DeviceError("Fallen off the bus.")

    sampler = EnergySampler(Lost(GpuConfig(kind="emulated")))
    sampler.start()
    wait_until(lambda: sampler.error is not None)
    assert not sampler.wait_for_reading_after(0.0, 60)
    sampler.stop()
    assert [record.getMessage() for record in caplog.records] == [
        "Energy of NVIDIA A100-SXM4-80GB (emulated) is not measured any more. Fallen off the bus."
    ]


@pytest.mark.parametrize(
    ("options", "limit"), [({"throttle_clock_mhz": 900}, "thermal"), ({"power_limit_w": 200.0}, "power_cap")]
)
def test_a_gpu_that_is_held_back_says_why(options: dict[str, float], limit: str) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", **options))  # type: ignore[arg-type]
    sampler = EnergySampler(gpu, with_energy=False)
    sampler.start()
    gpu.begin_work()
    begin_s = time.perf_counter()
    wait_until(lambda: len(sampler.states(begin_s)) >= 3)
    end_s = time.perf_counter()
    sampler.stop()
    clock_mhz, limits = clock_within(sampler.states(0.0), [(begin_s, end_s)])
    assert limits == {limit}
    assert clock_mhz < 1400
    assert sampler.trace(0.0).times_s == ()


def test_clock_and_limits_within_intervals() -> None:
    states = [GpuState(float(i), 1000 + i, frozenset({"thermal"} if i == 4 else ())) for i in range(10)]
    assert clock_within(states, [(1.5, 2.5), (4.0, 5.0)]) == ((1002 + 1004 + 1005) / 3, {"thermal"})
    assert clock_within(states, [(0.0, 1.0)]) == (1000.5, set())
    assert clock_within(states, [(0.0, 20.0)])[1] == {"thermal"}
    assert clock_within([*states, *states[5:] * 20], [(0.0, 20.0)])[1] == set()  # seen, but seldom
    clock_mhz, limits = clock_within(states, [(20.0, 21.0)])
    assert math.isnan(clock_mhz)
    assert limits == set()


@pytest.mark.parametrize(
    ("bits", "limits"), [("0x0", []), ("0x4", ["power_cap"]), ("0x68", ["hw_slowdown", "thermal"]), ("0x1", [])]
)
def test_limits_of_a_real_gpu(bits: str, limits: list[str], fake_driver: FakeDriver) -> None:
    script = "from lightning_pfo.device import open_gpu; print(sorted(open_gpu('nvml', 0).clock_limits()))"
    environment = fake_driver.environment() | {"FAKE_NVML_REASONS": bits}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(limits)
