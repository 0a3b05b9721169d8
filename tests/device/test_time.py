"""The host's time, and processes on its threads."""

from __future__ import annotations

import math
import queue
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from lightning_pfo.device import EmulatedGpu, GpuConfig
from lightning_pfo.device.time import HOST_TIME, HostTime, Process, run, time_of


def waiting_for(wake_ups: queue.SimpleQueue[str], seen: queue.SimpleQueue[str]) -> Process[None]:
    """Says where it is; sleeps for ever in between, until it is told to stop."""
    while True:
        seen.put(threading.current_thread().name)
        yield math.inf
        if not wake_ups.empty():
            seen.put("stopped")
            return


@pytest.fixture
def stop() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


@pytest.fixture
def seen() -> queue.SimpleQueue[str]:
    return queue.SimpleQueue()


def test_the_host_s_time_is_that_of_the_monotonic_clock() -> None:
    before_s = time.perf_counter()
    now_s = HostTime().now_s()
    assert before_s <= now_s <= time.perf_counter()
    HOST_TIME.sleep(0.01)
    assert HOST_TIME.now_s() - now_s >= 0.01
    HOST_TIME.sleep(-1)


def test_a_gpu_s_moments_are_its_own_else_the_host_s() -> None:
    gpu = EmulatedGpu(GpuConfig())
    assert time_of(gpu) is gpu.time_source
    assert time_of(SimpleNamespace(name="a real GPU")) is HOST_TIME


def test_a_process_runs_here_and_its_result_is_returned() -> None:
    def process() -> Process[str]:
        yield 0.01
        yield -1.0
        return threading.current_thread().name

    begin_s = HOST_TIME.now_s()
    assert run(HOST_TIME, process()) == threading.current_thread().name
    assert HOST_TIME.now_s() - begin_s >= 0.01


def test_a_started_process_has_a_thread_of_its_own_and_can_be_woken(
    stop: queue.SimpleQueue[str], seen: queue.SimpleQueue[str]
) -> None:
    task = HOST_TIME.spawn(waiting_for(stop, seen), "pfo-test")
    assert seen.get(timeout=30) == "pfo-test"
    assert task.is_running
    task.wake()
    assert seen.get(timeout=30) == "pfo-test"
    stop.put("stop")
    task.wake()
    assert seen.get(timeout=30) == "stopped"
    task.join(30)
    assert not task.is_running
    task.wake()  # nobody sleeps any more


def test_waking_before_the_sleep_ends_it_at_once(seen: queue.SimpleQueue[str]) -> None:
    is_woken = threading.Event()

    def process() -> Process[None]:
        assert is_woken.wait(30)
        yield math.inf
        yield 60.0
        seen.put("both")

    task = HOST_TIME.spawn(process(), "pfo-test")
    task.wake()
    task.wake()
    is_woken.set()
    task.join(30)
    assert seen.get_nowait() == "both"


def test_sleeps_of_a_started_process_end_by_themselves_too(seen: queue.SimpleQueue[str]) -> None:
    def process() -> Process[None]:
        begin_s = HOST_TIME.now_s()
        yield 0.02
        seen.put("long enough" if HOST_TIME.now_s() - begin_s >= 0.019 else "too short")
        yield -0.5  # nothing to sleep for
        seen.put("end")

    HOST_TIME.spawn(process(), "pfo-test").join(30)
    assert [seen.get_nowait(), seen.get_nowait()] == ["long enough", "end"]


def test_joining_gives_up_after_its_time(stop: queue.SimpleQueue[str], seen: queue.SimpleQueue[str]) -> None:
    task = HOST_TIME.spawn(waiting_for(stop, seen), "pfo-test")
    task.join(0.01)
    assert task.is_running
    stop.put("stop")
    task.wake()
    task.join(30)


def test_a_signal_handler_may_wake_a_process_while_the_main_thread_does(
    stop: queue.SimpleQueue[str], seen: queue.SimpleQueue[str]
) -> None:
    task = HOST_TIME.spawn(waiting_for(stop, seen), "pfo-test")
    found = signal.signal(signal.SIGALRM, lambda *_: task.wake())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(2000):
            task.wake()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, found)
    stop.put("stop")
    task.wake()
    task.join(30)
    assert not task.is_running
