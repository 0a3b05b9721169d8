"""The emulated GPU against hand-computed times and energies, in exact virtual time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.device.emulated.time import VirtualTime
from tests.device.later import later

# Round numbers: 1000 MHz at the top, no voltage rise, so P(f) = 100 + 300 f/1000; idle 50, blocked 50 + 0.1 * dynamic.
ROUND = GpuConfig(
    kind="emulated",
    top_clock_mhz=1000,
    min_clock_mhz=100,
    clock_step_mhz=100,
    power_limit_w=1000,
    static_power_w=100,
    dynamic_power_w=300,
    voltage_knee_mhz=1000,
    voltage_rise=0,
    idle_power_w=50,
    blocked_activity=0.1,
    clock_latency_s=0.0,
)


def make(**changes: object) -> tuple[EmulatedGpu, VirtualTime]:
    clock = VirtualTime()
    index = changes.pop("index", 0)
    return EmulatedGpu(replace(ROUND, **changes), index=index, time_source=clock), clock  # type: ignore[arg-type]


def run(gpu: EmulatedGpu, clock: VirtualTime, compute_s: float, memory_s: float = 0.0, real_s: float = 0.0) -> float:
    start_s = clock.now_s()
    gpu.begin_work()
    clock.sleep(real_s)
    gpu.finish_work(compute_s, memory_s)
    return clock.now_s() - start_s


def test_instruction_takes_its_time_at_the_top_clock() -> None:
    gpu, clock = make()
    assert run(gpu, clock, 0.03, 0.01) == pytest.approx(0.04)
    assert gpu.total_energy_mj() == pytest.approx(0.04 * 400e3)


def test_real_computation_runs_inside_the_modelled_time() -> None:
    gpu, clock = make()
    assert run(gpu, clock, 0.03, 0.01, real_s=0.025) == pytest.approx(0.04)
    assert gpu.num_overruns == 0


def test_only_the_compute_part_scales_with_the_clock() -> None:
    gpu, clock = make()
    gpu.lock_graphics_clock(500)
    assert run(gpu, clock, 0.03, 0.01) == pytest.approx(0.03 * 2 + 0.01)
    assert gpu.total_energy_mj() == pytest.approx(0.07 * 250e3)


def test_clock_lands_after_its_latency_in_the_middle_of_an_instruction() -> None:
    gpu, clock = make(clock_latency_s=0.01)
    gpu.lock_graphics_clock(500)  # at 0, lands at 0.01
    assert gpu.graphics_clock_mhz() == 1000
    # Half of 20 ms done at 1000 MHz, the other half takes twice as long.
    assert run(gpu, clock, 0.02) == pytest.approx(0.01 + 0.02)
    assert gpu.graphics_clock_mhz() == 500
    assert gpu.total_energy_mj() == pytest.approx(0.01 * 400e3 + 0.02 * 250e3)


def test_clock_requested_while_the_instruction_sleeps() -> None:
    gpu, clock = make()
    later(clock, 0.005, lambda: gpu.lock_graphics_clock(500))
    later(clock, 0.015, lambda: gpu.lock_graphics_clock(1000))
    # 5 ms at full speed, 10 ms at half, the remaining 10 of 20 ms at full.
    assert run(gpu, clock, 0.02) == pytest.approx(0.005 + 0.010 + 0.010)
    assert gpu.total_energy_mj() == pytest.approx(0.015 * 400e3 + 0.010 * 250e3)


def test_clocks_land_in_the_order_of_their_requests() -> None:
    gpu, clock = make(clock_latency_s=0.01)
    gpu.lock_graphics_clock(500)
    clock.sleep(0.004)
    gpu.lock_graphics_clock(300)
    seen = []
    for _ in range(8):
        seen.append(gpu.graphics_clock_mhz())
        clock.sleep(0.002)
    assert seen == [1000, 1000, 1000, 500, 500, 300, 300, 300]


def test_overrun_returns_at_once_and_is_counted() -> None:
    gpu, clock = make()
    assert run(gpu, clock, 0.03, real_s=0.05) == pytest.approx(0.05)
    assert gpu.num_overruns == 1
    assert gpu.total_energy_mj() == pytest.approx(0.05 * 400e3)


def test_a_machine_that_is_too_slow_is_told_so_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    gpu, clock = make(index=2, time="real")
    for real_s in (0.05, *[0.0] * 9):
        run(gpu, clock, 0.03, real_s=real_s)
    run(gpu, clock, 0.0)  # nothing is modelled
    gpu.close()
    assert caplog.messages == []
    run(gpu, clock, 0.03, real_s=0.05)
    gpu.close()
    assert "GPU 2, NVIDIA A100-SXM4-80GB (emulated): 2 of 11 instructions really took longer" in caplog.text
    assert "Use a larger gpu.forward_s" in caplog.text


def test_energy_of_waiting() -> None:
    gpu, clock = make()
    clock.sleep(1)  # idle
    gpu.set_waiting("blocked")
    clock.sleep(1)
    run(gpu, clock, 1.0)
    assert gpu.power_mw() == 80_000  # blocked again
    clock.sleep(1)
    gpu.set_waiting("idle")
    assert gpu.power_mw() == 50_000
    clock.sleep(1)
    assert gpu.total_energy_mj() == pytest.approx((50 + 80 + 400 + 80 + 50) * 1e3)


def test_waiting_state_may_change_during_an_instruction() -> None:
    gpu, _clock = make()
    gpu.begin_work()
    gpu.set_waiting("blocked")
    assert gpu.power_mw() == 400_000
    gpu.finish_work(1, 0)
    assert gpu.power_mw() == 80_000


def test_energy_counter_advances_in_ticks() -> None:
    gpu, clock = make(counter_tick_s=0.1)
    clock.sleep(0.05)
    assert gpu.total_energy_mj() == 0
    run(gpu, clock, 0.1)  # from 0.05 to 0.15
    assert gpu.total_energy_mj() == pytest.approx((0.05 * 50 + 0.05 * 400) * 1e3, abs=1)
    clock.sleep(0.04)
    assert gpu.total_energy_mj() == pytest.approx((0.05 * 50 + 0.05 * 400) * 1e3, abs=1)
    clock.sleep(0.02)
    assert gpu.total_energy_mj() == pytest.approx((0.05 * 50 + 0.1 * 400 + 0.05 * 50) * 1e3, abs=1)


def test_a_counter_that_lags_shows_its_ticks_late() -> None:
    gpu, clock = make(counter_tick_s=0.1, counter_lag_s=0.025)
    seen = []
    for duration_s in (0.05, 0.15, 0.04):  # idle to 0.05, computing to 0.2, idle to 0.24
        gpu.begin_work() if duration_s == 0.15 else None
        end_s = clock.now_s() + duration_s
        while clock.now_s() < end_s - 1e-9:
            clock.sleep(0.01)
            seen.append((round(clock.now_s(), 2), gpu.total_energy_mj()))
        gpu.finish_work(1e-12, 0) if duration_s == 0.15 else None
    first_j, second_j = 0.05 * 50 + 0.05 * 400, 0.05 * 50 + 0.15 * 400
    changes = [(b[0], b[1]) for a, b in pairwise(seen) if a[1] != b[1]]
    assert changes == [
        (0.13, pytest.approx(1e3 * first_j, abs=1)),  # the tick at 0.1
        (0.23, pytest.approx(1e3 * second_j, abs=1)),  # that at 0.2
    ]


def test_power_cap_holds_the_clock() -> None:
    gpu, clock = make(power_limit_w=250)  # 250 = 100 + 300 f/1000 at 500 MHz
    at_cap = [run(gpu, clock, 0.03, 0.01)]
    gpu.lock_graphics_clock(500)
    at_cap.append(run(gpu, clock, 0.03, 0.01))
    assert at_cap == pytest.approx([0.04, 0.04])  # times are given at the fastest clock the cap allows
    gpu.lock_graphics_clock(250 + 50)
    assert run(gpu, clock, 0.03, 0.01) == pytest.approx(0.03 * 500 / 300 + 0.01)
    gpu.lock_graphics_clock(1000)
    assert gpu.graphics_clock_mhz() == 1000  # not computing
    gpu.begin_work()
    assert gpu.graphics_clock_mhz() == 500
    assert gpu.power_mw() == pytest.approx(250_000, abs=1)


def test_throttling_holds_the_clock() -> None:
    gpu, clock = make(throttle_clock_mhz=400)
    assert run(gpu, clock, 0.02) == pytest.approx(0.05)
    assert gpu.graphics_clock_mhz() == 400


def test_straggler() -> None:
    changes = {"straggler_index": 2, "straggler_factor": 1.5}
    times = [run(*make(index=index, **changes), 0.02, 0.02) for index in range(4)]
    assert times == pytest.approx([0.04, 0.04, 0.06, 0.04])


def test_time_scale_shortens_all_durations() -> None:
    gpu, clock = make(time_scale=0.1, clock_latency_s=0.1)
    gpu.lock_graphics_clock(500)  # lands at 0.01
    assert run(gpu, clock, 0.2) == pytest.approx(0.01 + 0.02)


def test_noise_is_seeded_and_differs_between_gpus() -> None:
    def times(index: int, seed: int) -> list[float]:
        gpu, clock = make(noise=0.02, index=index, seed=seed)
        return [run(gpu, clock, 0.03) for _ in range(400)]

    first = times(0, 0)
    assert first == times(0, 0)
    assert first != times(1, 0)
    assert first != times(0, 1)
    mean = sum(first) / len(first)
    deviation = (sum((t - mean) ** 2 for t in first) / len(first)) ** 0.5
    assert mean == pytest.approx(0.03, rel=0.005)
    assert deviation / mean == pytest.approx(0.02, rel=0.2)


def test_restore_goes_back_to_the_top_clock_once() -> None:
    gpu, _clock = make()
    gpu.lock_graphics_clock(300)
    gpu.restore()
    assert gpu.graphics_clock_mhz() == 1000
    gpu.lock_graphics_clock(300)
    gpu.close()
    assert gpu.graphics_clock_mhz() == 1000


def test_wrong_order_of_calls() -> None:
    gpu, _ = make()
    with pytest.raises(DeviceError, match=r"begin_work\(\) at its beginning"):
        gpu.finish_work(1, 0)
    gpu.begin_work()
    with pytest.raises(DeviceError, match=r"finish_work\(...\) before"):
        gpu.begin_work()
    with pytest.raises(ConfigurationError, match="'busy'"):
        gpu.set_waiting("busy")


requests = st.lists(
    st.tuples(st.integers(0, 120), st.sampled_from([100, 300, 500, 800, 1000])),
    max_size=8,
    unique_by=lambda pair: pair[0],
)


def simulate_finely(
    changes: dict[float, int], compute_s: float, memory_s: float, latency_s: float, step_s: float
) -> tuple[float, float]:
    """Oracle: march in small steps; returns end time and energy."""
    landings = sorted((request_s + latency_s, mhz) for request_s, mhz in changes.items())
    time_s, done, energy_j = 0.0, 0.0, 0.0
    while done < 1:
        mhz = ([1000] + [m for lands_s, m in landings if lands_s <= time_s + step_s / 2])[-1]
        done += step_s / (compute_s * 1000 / mhz + memory_s)
        energy_j += step_s * (100 + 0.3 * mhz)
        time_s += step_s
    return time_s, energy_j


@settings(max_examples=60, deadline=None)
@given(
    requests,
    st.integers(5, 60),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.003, 0.02]),
    st.integers(0, 50),
)
def test_any_history_of_clocks_agrees_with_fine_steps(
    requests_ms: list[tuple[int, int]], compute_ms: int, memory_ms: int, latency_s: float, real_ms: int
) -> None:
    gpu, clock = make(clock_latency_s=latency_s)
    changes = {ms / 1000: mhz for ms, mhz in requests_ms}
    for request_s, mhz in changes.items():
        later(clock, request_s, lambda mhz=mhz: gpu.lock_graphics_clock(mhz))  # type: ignore[misc]
    step_s = 1e-4
    expected_s, expected_j = simulate_finely(changes, compute_ms / 1000, memory_ms / 1000, latency_s, step_s)
    taken_s = run(gpu, clock, compute_ms / 1000, memory_ms / 1000, real_s=real_ms / 1000)
    if real_ms / 1000 >= expected_s:
        assert taken_s == pytest.approx(real_ms / 1000)
    elif real_ms / 1000 < expected_s - step_s:
        assert taken_s == pytest.approx(expected_s, abs=2 * step_s)
        assert gpu.total_energy_mj() == pytest.approx(expected_j * 1000, abs=2 * step_s * 400 * 1000)


@given(st.lists(st.floats(0, 0.3), max_size=10), st.lists(st.floats(0, 0.3), max_size=5))
def test_reading_does_not_disturb(read_at_s: list[float], lock_at_s: list[float]) -> None:
    def final_energy(readings: list[float]) -> tuple[float, list[float]]:
        gpu, clock = make(clock_latency_s=0.004)
        seen: list[float] = []
        for number, time_s in enumerate(lock_at_s):
            later(clock, time_s, lambda mhz=100 * (number + 3): gpu.lock_graphics_clock(mhz))  # type: ignore[misc]
        for time_s in readings:
            later(clock, time_s, lambda: seen.append(gpu.total_energy_mj()))
        gpu.set_waiting("blocked")
        run(gpu, clock, 0.05, 0.01)
        clock.sleep(0.4)
        return gpu.total_energy_mj(), seen

    undisturbed, _ = final_energy([])
    total, seen = final_energy(sorted(read_at_s))
    assert total == pytest.approx(undisturbed, rel=1e-12)
    assert seen == sorted(seen)


def test_in_real_time_a_clock_from_another_thread_takes_effect_at_once() -> None:
    gpu = EmulatedGpu(replace(ROUND, time="real"))
    gpu.lock_graphics_clock(100)
    timer = threading.Timer(0.05, gpu.lock_graphics_clock, [1000])
    timer.start()
    start_s = time.perf_counter()
    gpu.begin_work()
    gpu.finish_work(0.5, 0)  # 5 s at 100 MHz
    timer.join()
    assert 0.5 <= time.perf_counter() - start_s < 4


def test_in_real_time_an_instruction_takes_at_least_its_time() -> None:
    gpu = EmulatedGpu(replace(ROUND, time="real"))
    for _ in range(5):
        start_s = time.perf_counter()
        gpu.begin_work()
        gpu.finish_work(0.008, 0.002)
        assert time.perf_counter() - start_s >= 0.01 - 1e-6
    assert gpu.total_energy_mj() >= 5 * 0.01 * 400e3 - 1
