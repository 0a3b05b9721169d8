"""Clocks read back: how long they take, which are not reached, and requests for a later moment."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Generator

import pytest

from lightning_pfo.core.errors import NotSupportedError
from lightning_pfo.device import ClockController, EmulatedGpu, GpuConfig
from lightning_pfo.device.clocks.transition import Transition, TransitionLog, measure_latency
from lightning_pfo.device.time import run
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


def watched(
    log: TransitionLog, gpu: EmulatedGpu, clock_mhz: int, ago_s: float = 0.0, stops_after_s: float = math.inf
) -> Transition:
    """Watch a change that was asked for a while ago, and stop when the next one comes."""
    source, now_s = gpu.time_source, gpu.time_source.now_s()

    def pause(duration_s: float) -> Generator[float, None, bool]:
        yield duration_s
        return source.now_s() >= now_s + stops_after_s

    return run(source, log.watch(clock_mhz, now_s - ago_s, pause))


def test_a_clock_that_lands_is_timed_from_its_request() -> None:
    log = TransitionLog(gpu := ScriptedGpu(1410, 1410, 1200))
    transition = watched(log, gpu, 1200, ago_s=0.002)
    assert transition.latency_s == pytest.approx(0.003)  # two polls of half a millisecond
    assert transition.reached_mhz == 1200
    statistics = log.statistics(1)
    assert (statistics.num_observed, statistics.not_reached) == (1, {})
    assert str(statistics) == "1 clock change; reached after 3.0 ms (nine in ten: 3.0 ms)"
    assert statistics.as_dict()["latency_s"] == statistics.latency_s


@pytest.mark.parametrize(("count", "within"), [(2, 2), (9, 9), (10, 9), (20, 18)])
def test_nine_in_ten_latencies_are_within_the_last_figure(count: int, within: int) -> None:
    log = TransitionLog(gpu := ScriptedGpu(1200))
    for latency_ms in range(1, count + 1):
        watched(log, gpu, 1200, ago_s=latency_ms / 1000)
    assert log.statistics(count).latency_p90_s == pytest.approx(within / 1000)


@pytest.mark.parametrize(("shown_mhz", "latency_s"), [(1207, 0.0), (1208, None)])
def test_a_reading_nearer_than_half_a_step_counts(shown_mhz: int, latency_s: float | None) -> None:
    gpu = ScriptedGpu(shown_mhz)
    assert watched(TransitionLog(gpu), gpu, 1200).latency_s == latency_s


def test_a_clock_that_is_never_there_is_not_reached_and_costs_few_readings() -> None:
    gpu = ScriptedGpu(*[1290] * 1000, limits=frozenset({"power_cap"}))
    log = TransitionLog(gpu)
    assert watched(log, gpu, 1410).latency_s is None
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
    limits: frozenset[str], not_reached: dict[int, int]
) -> None:
    log = TransitionLog(gpu := ScriptedGpu(1290, limits=limits))
    watched(log, gpu, 1410, stops_after_s=0.003)
    statistics = log.statistics(1)
    assert statistics.not_reached == not_reached
    assert statistics.num_overtaken == (not limits)
    assert ("1 of 1 watched were not seen to land before the next one" in str(statistics)) == (not limits)


def test_once_the_latency_is_known_polls_begin_late() -> None:
    gpu = ScriptedGpu(1200)
    log = TransitionLog(gpu)
    assert log.usual_latency_s == 0
    for _ in range(5):
        gpu.shown_mhz = [1410] * 8 + [1200]
        watched(log, gpu, 1200)
    assert log.usual_latency_s > 0.004
    gpu.shown_mhz = [1410] * 9 + [1200]
    watched(log, gpu, 1200, stops_after_s=0.001)
    assert len(gpu.shown_mhz) == 9  # one reading


def passes(gpu: EmulatedGpu, duration_s: float) -> None:
    """Let time pass, be it real or virtual."""
    gpu.time_source.sleep(duration_s)


def test_the_controller_reports_the_latency_of_a_virtual_gpu() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0.02))
    with ClockController(gpu) as clocks:
        for clock_mhz in (1410, 1200, 1005, 1200, 1005, 1200):
            clocks.request(clock_mhz)
            passes(gpu, 0.05)
        statistics = clocks.statistics()
        assert (statistics.num_changes, statistics.num_observed) == (6, 6)  # the first one was there already
        assert 0.02 <= statistics.latency_s <= 0.022  # polled at a tenth of what has passed
        assert statistics.latency_p90_s <= 0.022
        assert statistics.not_reached == {}
        assert clocks.usual_latency_s == statistics.latency_s
        clocks.request(900)
        passes(gpu, 0.019)
        clocks.request(885)  # overtakes it
        passes(gpu, 0.03)
        assert clocks.statistics().num_changes == 8
        assert clocks.statistics().num_observed == 7


def test_of_many_changes_an_eighth_is_watched() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0.02))
    with ClockController(gpu) as clocks:
        for number in range(512):
            clocks.request((1410, 1200)[number % 2])
            passes(gpu, 0.05)
        statistics = clocks.statistics()
    assert (statistics.num_changes, statistics.num_observed) == (512, 200 + 2 * 16)
    assert sum(map(len, clocks.latencies_by_pair.values())) == 200 + 2 * 16 - 3  # the first of a row has none before


def test_the_controller_reports_the_latency_of_a_live_gpu() -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", time="real", clock_latency_s=0.02))
    with ClockController(gpu) as clocks:
        for number, clock_mhz in enumerate((1410, 1200, 1005, 1200), start=1):
            clocks.request(clock_mhz)
            wait_until(lambda number=number: clocks.statistics().num_observed >= number)  # type: ignore[misc]
        statistics = clocks.statistics()
    assert (statistics.num_changes, statistics.num_observed) == (4, 4)
    assert statistics.latency_s >= 0.019
    assert statistics.not_reached == {}


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_a_throttled_gpu_s_clocks_are_not_reached(time: str) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", time=time, throttle_clock_mhz=900, clock_latency_s=0))
    with ClockController(gpu) as clocks:
        clocks.request(1410)
        passes(gpu, 0.3)
        wait_until(lambda: bool(clocks.statistics().not_reached))
        clocks.request(855)
        wait_until(lambda: clocks.statistics().num_observed == 1)
        assert clocks.statistics().not_reached == {1410: 1}
        assert clocks.statistics().limits == {"thermal"}


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_clocks_that_cannot_be_read_are_set_all_the_same(time: str) -> None:
    class Blind(EmulatedGpu):
        def graphics_clock_mhz(self) -> int:
            raise NotSupportedError("This GPU does not tell its clock.")

    with ClockController(Blind(GpuConfig(kind="emulated", time=time))) as clocks:
        for clock_mhz in (1410, 1200):
            clocks.request(clock_mhz)
            assert clocks.wait(30)
        assert (clocks.num_changes, clocks.error) == (2, None)


class NotingGpu(EmulatedGpu):
    """Notes when it was told a clock."""

    def __init__(self, config: GpuConfig) -> None:
        super().__init__(config)
        self.locked: list[tuple[int, float]] = []

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        super().lock_graphics_clock(clock_mhz)
        self.locked.append((clock_mhz, self.time_source.now_s()))


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_a_request_for_later_comes_at_its_time_unless_overtaken(time: str) -> None:
    gpu = NotingGpu(GpuConfig(kind="emulated", time=time))
    with ClockController(gpu) as clocks:
        clocks.request(1410)
        assert clocks.wait(30)
        due_s = gpu.time_source.now_s() + 0.3
        clocks.request_at(1200, due_s)
        assert clocks.wait(0)  # nothing is due yet
        passes(gpu, 0.3)
        wait_until(lambda: len(gpu.locked) == 2)
        assert gpu.locked[1][0] == 1200
        assert gpu.locked[1][1] >= due_s
        clocks.request_at(1005, gpu.time_source.now_s() + 30)
        clocks.request(1305)
        assert clocks.wait(30)
        clocks.request_at(900, gpu.time_source.now_s() - 1)  # late already: at once
        assert clocks.wait(30)
    assert [clock_mhz for clock_mhz, _ in gpu.locked] == [1410, 1200, 1305, 900]


@pytest.mark.parametrize("latency_s", [0.0, 0.004, 0.5])  # landed, being watched and not reached when it is due
def test_in_virtual_time_a_request_for_later_comes_at_its_very_moment(latency_s: float) -> None:
    gpu = NotingGpu(GpuConfig(kind="emulated", clock_latency_s=latency_s))
    with ClockController(gpu) as clocks:
        clocks.request(1305)
        clocks.request_at(1200, 0.0031)
        passes(gpu, 0.002)
        assert gpu.locked == [(1305, 0.0)]
        passes(gpu, 0.5)
        clocks.request_at(1005, 0.9)
        clocks.request_at(990, 0.7)  # in place of it
        passes(gpu, 1)
    assert gpu.locked == [(1305, 0.0), (1200, 0.0031), (990, 0.7)]


@pytest.mark.parametrize("time", ["virtual", "real"])
def test_measuring_the_latency_restores_the_clock(time: str) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", time=time, clock_latency_s=0.01))
    statistics = measure_latency(gpu, [1200, 1410, 1200])
    assert statistics.num_observed == 3
    assert statistics.latency_s >= 0.0099
    assert not gpu._is_locked


class WatchedGpu(EmulatedGpu):
    """Starts a watchdog before its first change, as real GPUs do, which takes a second."""

    is_watched = False

    def claim_clocks(self) -> None:
        if not self.is_watched:
            self.time_source.sleep(1.0)
        self.is_watched = True

    def lock_graphics_clock(self, clock_mhz: int) -> None:
        self.claim_clocks()
        super().lock_graphics_clock(clock_mhz)


def test_the_start_of_the_watchdog_is_not_part_of_the_latency() -> None:
    gpu = WatchedGpu(GpuConfig(kind="emulated", clock_latency_s=0.0))
    statistics = measure_latency(gpu, [1200, 1410, 1200])
    assert gpu.is_watched
    assert statistics.num_observed == 3
    assert statistics.latency_p90_s < 0.01


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
    wait_until(lambda: not fake_driver.locked_gpus())  # the watchdog does it: the GPU was lost when we tried
