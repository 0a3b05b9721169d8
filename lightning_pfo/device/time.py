"""One source of time: what measures a GPU asks the GPU's own, be it the host's clock or a virtual one.

What watches a GPU beside the training, such as the energy sampler, is written as a *process*: a generator that yields
how long it wants to sleep. The host's time runs it on a thread; virtual time runs it when its moment has come::

    def watch() -> Process:
        while True:
            yield 0.02
            note(gpu.power_mw())

    task = time_of(gpu).spawn(watch(), "power")
"""

from __future__ import annotations

import contextlib
import math
import platform
import queue
import threading
import time
from collections.abc import Generator
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Process = Generator[float, None, T]
"""Yields how long to sleep, s; `math.inf`: until it is woken."""


class Task(Protocol):
    """A process that was started."""

    @property
    def is_running(self) -> bool:
        """Whether it goes on while the caller waits; a process in virtual time does not."""

    def wake(self) -> None:
        """End its sleep now; once more if it does not sleep. Any thread may, and signal handlers."""

    def join(self, timeout_s: float) -> None:
        """Wait until it is over, if it is running."""


class TimeSource(Protocol):
    """Moments, and waiting for them."""

    @property
    def scope(self) -> str:
        """Moments of two sources with the same scope can be compared, in different processes too."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never decreases."""

    def sleep(self, duration_s: float) -> None:
        """Let time pass."""

    def spawn(self, process: Process[Any], name: str) -> Task:
        """Start a process; `name` is that of its thread, if it gets one."""


class HostTime:
    """The system's monotonic clock, the one that `time.perf_counter` reads: it counts since the machine was started."""

    @cached_property
    def scope(self) -> str:
        """The machine, since it was started last."""
        with contextlib.suppress(OSError):
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return platform.node()

    def now_s(self) -> float:
        """See `TimeSource`."""
        return time.perf_counter()

    def sleep(self, duration_s: float) -> None:
        """See `TimeSource`."""
        time.sleep(max(0.0, duration_s))

    def spawn(self, process: Process[Any], name: str) -> Task:
        """Start a process on a thread of its own."""
        return _ThreadTask(process, name)


HOST_TIME = HostTime()


def time_of(gpu: object) -> TimeSource:
    """Where moments of a GPU come from: its attribute `time_source`, else the host's clock."""
    source: TimeSource = getattr(gpu, "time_source", HOST_TIME)
    return source


def run(source: TimeSource, process: Process[T]) -> T:
    """Run a process here and now; returns what it returns."""
    while True:
        try:
            source.sleep(next(process))
        except StopIteration as end:
            result: T = end.value
            return result


class _ThreadTask:
    def __init__(self, process: Process[Any], name: str) -> None:
        self._process = process
        self._wake_ups: queue.SimpleQueue[None] = queue.SimpleQueue()  # the only queue that is safe in signal handlers
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wake(self) -> None:
        self._wake_ups.put(None)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        for duration_s in self._process:
            with contextlib.suppress(queue.Empty):
                self._wake_ups.get(timeout=None if duration_s == math.inf else max(0.0, duration_s))
