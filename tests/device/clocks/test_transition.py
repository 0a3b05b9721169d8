"""Clocks read back: how long they take, which are not reached, and requests for a later moment."""

from __future__ import annotations

import math
import subprocess
import sys
import time

import pytest

from lightning_pfo.core.errors import NotSupportedError
from lightning_pfo.device import ClockController, EmulatedGpu, GpuConfig
from lightning_pfo.device.clocks.transition import TransitionLog, measure_latency
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.waiting import wait_until

__all__ = ["fake_driver"]


class ScriptedGpu(EmulatedGpu):
    """Shows the clocks of a list, one per reading; the last one for ever."""

    def __init__(self, *shown_mhz: int, limits: frozenset[str] = frozenset()) -> None:
        super().__init__(GpuConfig(kind="emulated"))
        self.shown_mhz = list(shown_mhz)
        self.limits = limits

    def graphics_clock_mhz(self) -> int:
        return self.shown_mhz.pop(0) if len(self.shown_mhz) > 1 else self.shown_mhz[0]

    def clock_limits(self) -> frozenset[str]:
        return self.limits


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("lightning_pfo.device.clocks.transition.time.perf_counter", lambda: now[0])
    return now


def sleeper(now: list[float], stops_after: float = math.inf) -> object:
    def sleep(duration_s: float) -> bool:
        now[0] += max(0.0, duration_s)
        return now[0] >= stops_after

    return sleep


def test_a_clock_that_lands_is_timed_from_its_request(now: list[float]) -> None:
    log = TransitionLog(ScriptedGpu(1410, 1410, 1200))
    transition = log.watch(1200, requested_s=99.998, sleep=sleeper(now))  # type: ignore[arg-type]
    assert transition.latency_s == pytest.approx(0.003, abs=1e-4)  # two polls of half a millisecond
    assert transition.reached_mhz == 1200
    statistics = log.statistics(1)
    assert (statistics.num_observed, statistics.not_reached) == (1, {})
    assert str(statistics) == "1 clock change; reached after 3.0 ms (nine in ten: 3.0 ms)"
    assert statistics.as_dict()["latency_s"] == statistics.latency_s


@pytest.mark.parametrize(("count", "within"), [(2, 2), (9, 9), (10, 9), (20, 18)])
def test_nine_in_ten_latencies_are_within_the_last_figure(count: int, within: int, now: list[float]) -> None:
    log = TransitionLog(ScriptedGpu(1200))
    for latency_ms in range(1, count + 1):
        log.watch(1200, requested_s=now[0] - latency_ms / 1000, sleep=sleeper(now))  # type: ignore[arg-type]
    assert log.statistics(count).latency_p90_s == pytest.approx(within / 1000, abs=1e-4)


def test_a_reading_nearer_than_half_a_step_counts(now: list[float]) -> None:
    log = TransitionLog(ScriptedGpu(1207))
    assert log.watch(1200, 100.0, sleeper(now)).latency_s == 0  # type: ignore[arg-type]
    assert TransitionLog(ScriptedGpu(1208)).watch(1200, 100.0, sleeper(now)).latency_s is None  # type: ignore[arg-type]


def test_a_clock_that_is_never_there_is_not_reached_and_costs_few_readings(now: list[float]) -> None:
    gpu = ScriptedGpu(*[1290] * 1000, limits=frozenset({"power_cap"}))
    log = TransitionLog(gpu)
    assert log.watch(1410, 100.0, sleeper(now)).latency_s is None  # type: ignore[arg-type]
    assert len(gpu.shown_mhz) > 940
    assert str(log.statistics(1)) == "1 clock change; not reached: 1410 MHz 1 time (power_cap)"
    assert log.statistics(1).as_dict() == {
        "num_changes": 1,
        "latency_s": None,
        "latency_p90_s": None,
        "not_reached": {"1410": 1},
        "limits": ["power_cap"],
    }


@pytest.mark.parametrize(("limits", "not_reached"), [(frozenset(), {}), (frozenset({"thermal"}), {1410: 1})])
def test_an_overtaken_change_is_judged_only_if_something_held_it(
    now: list[float], limits: frozenset[str], not_reached: dict[int, int]
) -> None:
    log = TransitionLog(ScriptedGpu(1290, limits=limits))
    log.watch(1410, 100.0, sleeper(now, stops_after=100.003))  # type: ignore[arg-type]
    assert log.statistics(1).not_reached == not_reached


def test_once_the_latency_is_known_polls_begin_late(now: list[float]) -> None:
    gpu = ScriptedGpu(1200)
    log = TransitionLog(gpu)
    assert log.usual_latency_s == 0
    for _ in range(5):
        gpu.shown_mhz = [1410] * 8 + [1200]
        log.watch(1200, now[0], sleeper(now))  # type: ignore[arg-type]
    assert log.usual_latency_s > 0.004
    gpu.shown_mhz = [1410] * 9 + [1200]
    begin_s = now[0]
    log.watch(1200, begin_s, sleeper(now, stops_after=begin_s + 0.001))  # type: ignore[arg-type]
    assert len(gpu.shown_mhz) == 9  # one reading


def test_the_controller_reports_the_latency_of_a_live_gpu() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0.02))
    with ClockController(gpu) as clocks:
        for number, clock_mhz in enumerate((1410, 1200, 1005, 1200, 1005, 1200), start=1):
            clocks.request(clock_mhz)
            wait_until(lambda number=number: clocks.statistics().num_observed >= number - 1)  # type: ignore[misc]
            time.sleep(0.05)
        statistics = clocks.statistics()
    assert statistics.num_changes == 6
    assert statistics.num_observed >= 5  # the first one was there already
    assert statistics.latency_s >= 0.019
    assert statistics.not_reached == {}


def test_a_throttled_gpu_s_clocks_are_not_reached() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", throttle_clock_mhz=900, clock_latency_s=0))
    with ClockController(gpu) as clocks:
        clocks.request(1410)
        wait_until(lambda: bool(clocks.statistics().not_reached))
        clocks.request(855)
        wait_until(lambda: clocks.statistics().num_observed == 1)
        assert clocks.statistics().not_reached == {1410: 1}
        assert clocks.statistics().limits == {"thermal"}


def test_clocks_that_cannot_be_read_are_set_all_the_same() -> None:
    class Blind(EmulatedGpu):
        def graphics_clock_mhz(self) -> int:
            raise NotSupportedError("This GPU does not tell its clock.")

    with ClockController(Blind(GpuConfig(kind="emulated"))) as clocks:
        for clock_mhz in (1410, 1200):
            clocks.request(clock_mhz)
            assert clocks.wait(30)
        assert (clocks.num_changes, clocks.error) == (2, None)


def test_a_request_for_later_comes_at_its_time_unless_overtaken() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated"))
    locked: list[tuple[int, float]] = []
    lock = gpu.lock_graphics_clock
    gpu.lock_graphics_clock = lambda mhz: (lock(mhz), locked.append((mhz, time.perf_counter())))[0]  # type: ignore
    with ClockController(gpu) as clocks:
        clocks.request(1410)
        assert clocks.wait(30)
        due_s = time.perf_counter() + 0.3
        clocks.request_at(1200, due_s)
        assert clocks.wait(0)  # nothing is due yet
        wait_until(lambda: len(locked) == 2)
        assert locked[1][0] == 1200
        assert locked[1][1] >= due_s
        clocks.request_at(1005, time.perf_counter() + 30)
        clocks.request(1305)
        assert clocks.wait(30)
        clocks.request_at(900, time.perf_counter() - 1)  # late already: at once
        assert clocks.wait(30)
    assert [clock_mhz for clock_mhz, _ in locked] == [1410, 1200, 1305, 900]


def test_measuring_the_latency_restores_the_clock() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0.01))
    statistics = measure_latency(gpu, [1200, 1410, 1200])
    assert statistics.num_observed == 3
    assert statistics.latency_s >= 0.0099
    assert not gpu._is_locked


def test_capped_clocks_and_a_gpu_that_is_lost_in_between(fake_driver: FakeDriver, tmp_path: object) -> None:
    script = """
import logging, os, sys, time
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
from lightning_pfo.device import ClockController, open_gpu
gpu = open_gpu("nvml", 0)
with ClockController(gpu) as clocks:
    for clock_mhz in (1410, 1200, 1110):
        clocks.request(clock_mhz)
        assert clocks.wait(30)
        time.sleep(0.4)
    print(clocks.statistics())
    open(os.environ["FAKE_NVML_LOST_FILE"], "w").close()
    clocks.request(900)
    assert not clocks.wait(30)
    assert "fallen off the bus" in str(clocks.error)
    os.unlink(os.environ["FAKE_NVML_LOST_FILE"])  # else the watchdog tries for 4 s
"""
    environment = fake_driver.environment(cap_mhz=1290, landing_ms=20, lost_file=f"{tmp_path}/lost")
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert "3 clock changes; reached after " in done.stdout, done.stderr
    assert "not reached: 1410 MHz 1 time (power_cap)" in done.stdout
    assert "Clock control of Fake GPU 0 stops; training goes on." in done.stdout
    assert fake_driver.locked_gpus() == {}
