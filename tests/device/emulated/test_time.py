"""Virtual time by hand, and the host's where an emulated GPU waits in it."""

from __future__ import annotations

import math
import queue
import signal
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pfo.device import ClockController, EmulatedGpu, GpuConfig
from lightning_pfo.device.emulated.time import RealTime, VirtualTime
from lightning_pfo.device.time import Process, run
from tests.device.later import later


@pytest.fixture
def virtual() -> VirtualTime:
    return VirtualTime()


def note_every(period_s: float, name: str, virtual: VirtualTime, seen: list[tuple[str, float]]) -> Process[None]:
    while True:
        yield period_s
        seen.append((name, virtual.now_s()))


def test_time_passes_only_where_somebody_sleeps(virtual: VirtualTime) -> None:
    host_s = time.perf_counter()
    assert virtual.now_s() == 0
    virtual.sleep(1e6)
    assert virtual.now_s() == 1e6
    assert time.perf_counter() - host_s < 1e5
    virtual.sleep_until(1e6 + 1)
    assert virtual.now_s() == 1e6 + 1


def test_processes_run_at_their_moments_the_first_that_slept_first(virtual: VirtualTime) -> None:
    seen: list[tuple[str, float]] = []
    virtual.spawn(note_every(2.0, "slow", virtual, seen), "slow")
    virtual.spawn(note_every(1.0, "fast", virtual, seen), "fast")
    later(virtual, 4.0, lambda: seen.append(("once", virtual.now_s())))
    virtual.sleep(4.5)
    # at 2 s the slow one has slept since 0, the fast one since 1
    assert seen == [
        ("fast", 1.0),
        ("slow", 2.0),
        ("fast", 2.0),
        ("fast", 3.0),
        ("once", 4.0),
        ("slow", 4.0),
        ("fast", 4.0),
    ]
    assert virtual.now_s() == 4.5


def test_a_process_runs_at_once_until_it_sleeps_and_at_the_end_of_the_caller_s_sleep(virtual: VirtualTime) -> None:
    seen: list[str] = []

    def process() -> Process[None]:
        seen.append("begin")
        yield 1.0
        seen.append("end")

    task = virtual.spawn(process(), "process")
    assert seen == ["begin"]
    virtual.sleep(1.0)
    assert seen == ["begin", "end"]
    task.wake()  # it is over
    assert seen == ["begin", "end"]
    assert not task.is_running
    task.join(30)


def test_a_process_that_is_woken_does_not_run_again_at_the_end_of_the_sleep_it_left(virtual: VirtualTime) -> None:
    seen: list[tuple[str, float]] = []
    task = virtual.spawn(note_every(10.0, "woken", virtual, seen), "woken")
    later(virtual, 4.0, task.wake)
    virtual.sleep(12.0)
    assert seen == [("woken", 4.0)]
    virtual.sleep(12.0)
    assert seen == [("woken", 4.0), ("woken", 14.0), ("woken", 24.0)]


def test_an_infinite_sleep_ends_only_by_being_woken(virtual: VirtualTime) -> None:
    seen: list[tuple[str, float]] = []
    task = virtual.spawn(note_every(math.inf, "woken", virtual, seen), "woken")
    virtual.sleep(1e9)
    assert seen == []
    task.wake()
    assert seen == [("woken", 1e9)]


def test_a_negative_sleep_is_none(virtual: VirtualTime) -> None:
    seen: list[tuple[str, float]] = []
    virtual.sleep(1.0)
    virtual.sleep(-0.5)
    virtual.sleep_until(0.25)
    assert virtual.now_s() == 1.0
    later(virtual, -3.0, lambda: seen.append(("late", virtual.now_s())))
    virtual.sleep(0.0)
    assert seen == [("late", 1.0)]


def test_a_process_that_wakes_itself_goes_round_once_more(virtual: VirtualTime) -> None:
    """As when what it does makes somebody ask it for more: nobody enters a generator that runs."""
    seen: list[float] = []

    def process() -> Process[None]:
        while True:
            yield 1.0
            seen.append(virtual.now_s())
            if len(seen) == 1:
                task.wake()
                task.wake()

    task = virtual.spawn(process(), "process")
    virtual.sleep(2.5)
    assert seen == [1.0, 1.0, 2.0]  # the second sleep ended at once, the third lasts


def test_a_signal_handler_that_has_interrupted_a_process_may_wake_it(virtual: VirtualTime) -> None:
    seen: list[str] = []

    def process() -> Process[None]:
        while True:
            seen.append("in")
            if seen.count("in") == 2:
                signal.raise_signal(signal.SIGUSR1)
            seen.append("out")
            yield math.inf

    def on_signal(*_: object) -> None:
        seen.append("signal")
        task.wake()

    found = signal.signal(signal.SIGUSR1, on_signal)
    try:
        task = virtual.spawn(process(), "process")
        task.wake()
    finally:
        signal.signal(signal.SIGUSR1, found)
    assert seen == ["in", "out", "in", "signal", "out", "in", "out"]


def test_a_controller_is_closed_by_a_signal_in_mid_change(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = EmulatedGpu(GpuConfig(kind="emulated", clock_latency_s=0))
    clocks = ClockController(gpu)
    lock = EmulatedGpu.lock_graphics_clock

    def interrupted(gpu: EmulatedGpu, clock_mhz: int) -> None:
        lock(gpu, clock_mhz)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(EmulatedGpu, "lock_graphics_clock", interrupted)
    found = signal.signal(signal.SIGUSR1, lambda *_: clocks.close())
    try:
        clocks.request(1200)
    finally:
        signal.signal(signal.SIGUSR1, found)
    assert clocks.num_changes == 1
    assert gpu.graphics_clock_mhz() == 1410


def test_waiting_ends_as_soon_as_somebody_wakes(virtual: VirtualTime) -> None:
    wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
    virtual.wait(wake_ups, 1.0)
    assert virtual.now_s() == 1.0
    later(virtual, 0.25, lambda: wake_ups.put(None))
    virtual.wait(wake_ups, 1.0)
    assert virtual.now_s() == 1.25
    assert wake_ups.empty()
    wake_ups.put(None)
    virtual.wait(wake_ups, 1.0)  # woken before
    assert virtual.now_s() == 1.25


def test_a_request_in_mid_instruction_changes_when_it_ends() -> None:
    """20 ms at 1000 MHz: 5 ms of them, then 1 ms of latency, then 14 ms of work that take twice as long."""
    config = GpuConfig(kind="emulated", top_clock_mhz=1000, min_clock_mhz=100, clock_step_mhz=100, voltage_knee_mhz=900)
    config.clock_latency_s = 0.001
    gpu = EmulatedGpu(config)
    with ClockController(gpu) as clocks:
        clocks.request(1000)
        later(gpu.time_source, 0.005, lambda: clocks.request(500))
        gpu.begin_work()
        gpu.finish_work(0.02, 0.0)
        assert gpu.time_source.now_s() == pytest.approx(0.006 + 2 * 0.014)
    assert gpu.num_overruns == 0


sleeps = st.lists(st.one_of(st.floats(-1, 3), st.sampled_from([0.0, 0.5, 1.0, math.inf])), max_size=6)


@given(st.lists(sleeps, max_size=4), st.lists(st.tuples(st.booleans(), st.floats(-1, 3)), max_size=6))
def test_time_never_goes_back(processes: list[list[float]], waits: list[tuple[bool, float]]) -> None:
    virtual = VirtualTime()
    wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
    moments_s = [0.0]

    def process(sleeps_s: Iterator[float]) -> Process[None]:
        for number, sleep_s in enumerate(sleeps_s):
            moments_s.append(virtual.now_s())
            if number % 3 == 1:
                wake_ups.put(None)
            if number % 3 == 2:
                virtual.sleep(0.3)  # a process may also let time pass itself
                moments_s.append(virtual.now_s())
            yield sleep_s

    for sleeps_s in processes:
        virtual.spawn(process(iter(sleeps_s)), "process")
    for is_interruptible, duration_s in waits:
        before_s = virtual.now_s()
        if is_interruptible:
            virtual.wait(wake_ups, duration_s)
        else:
            virtual.sleep(duration_s)
            assert virtual.now_s() >= before_s + max(0.0, duration_s)
        moments_s.append(virtual.now_s())
    assert moments_s == sorted(moments_s)


def test_a_process_may_be_run_here_and_now(virtual: VirtualTime) -> None:
    def process() -> Process[str]:
        yield 1.5
        yield 0.5
        return "done"

    assert run(virtual, process()) == "done"
    assert virtual.now_s() == 2.0


def test_gpus_have_virtual_time_unless_they_are_told_otherwise() -> None:
    assert isinstance(EmulatedGpu(GpuConfig()).time_source, VirtualTime)
    real = EmulatedGpu(GpuConfig(time="real"))
    assert isinstance(real.time_source, RealTime)
    assert (real.name, EmulatedGpu(GpuConfig()).name) == (
        "NVIDIA A100-SXM4-80GB (emulated)",
        "NVIDIA A100-SXM4-80GB (emulated, virtual time)",
    )


@pytest.mark.parametrize("duration_s", [0.0, 0.0002, 0.01])
def test_in_real_time_a_wait_is_not_too_short(duration_s: float) -> None:
    begin_s = time.perf_counter()
    RealTime().wait(queue.SimpleQueue(), duration_s)
    assert time.perf_counter() - begin_s >= duration_s


def test_in_real_time_a_wait_ends_as_soon_as_somebody_wakes() -> None:
    wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()
    wake_ups.put(None)
    begin_s = time.perf_counter()
    RealTime().wait(wake_ups, 60)
    assert time.perf_counter() - begin_s < 30
    assert wake_ups.empty()
