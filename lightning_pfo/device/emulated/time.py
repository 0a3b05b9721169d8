"""Time as the emulated GPU sees it: virtual, which passes only when somebody sleeps, or that of the host.

::

    virtual    0.00 ---- finish_work(...) --> 0.04 ---- inputs arrive --> 0.05       takes no time of the host
    due            poll  poll clock lands                                            processes run at their moments
"""

from __future__ import annotations

import contextlib
import heapq
import math
import queue
import time
from itertools import count
from typing import Any, Protocol

from lightning_pfo.device.time import HostTime, Process, Task, TimeSource

_OVERSLEEP_S = 0.0003  # what waking from a timed wait costs on a busy machine
_SPIN_S = 0.00015


class EmulationTime(TimeSource, Protocol):
    """A time in which an instruction can be waited for."""

    def wait(self, wake_ups: queue.SimpleQueue[None], timeout_s: float) -> None:
        """Return after `timeout_s`, or as soon as something is put into `wake_ups`, which is taken out."""


class RealTime(HostTime):
    """The host's clock, with exact waits.

    A waiting queue is safe against signal handlers, where a `Condition` is not. As timed waits return a few tenths of a
    millisecond late, the last of them is slept separately and the end spun: about 1 % of a core for instructions
    of tens of milliseconds.
    """

    def wait(self, wake_ups: queue.SimpleQueue[None], timeout_s: float) -> None:
        """Sleep, unless woken (not any more in the last 0.3 ms)."""
        end_s = time.perf_counter() + timeout_s
        if timeout_s > _OVERSLEEP_S:
            with contextlib.suppress(queue.Empty):
                wake_ups.get(timeout=timeout_s - _OVERSLEEP_S)
                return
        time.sleep(max(0.0, end_s - time.perf_counter() - _SPIN_S))
        while time.perf_counter() < end_s:
            pass


class VirtualTime:
    """Time that passes only when somebody sleeps: a discrete-event simulation of one rank, on the thread that sleeps.

    A process runs when time gets to the end of its sleep, on whatever thread lets it pass, so that nothing depends on
    when threads run.
    """

    scope = "virtual time"

    def __init__(self) -> None:
        self._now_s = 0.0
        self._due: list[tuple[float, int, _VirtualTask]] = []  # a heap: the earliest first, then the first that slept
        self._count = count()

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        """Let time pass."""
        self.sleep_until(self._now_s + duration_s)

    def sleep_until(self, moment_s: float) -> None:
        """Let time pass until a moment; none if it is over."""
        while self._run_next(moment_s):
            pass
        self._now_s = max(self._now_s, moment_s)

    def wait(self, wake_ups: queue.SimpleQueue[None], timeout_s: float) -> None:
        """See `EmulationTime`."""
        end_s = self._now_s + timeout_s
        while wake_ups.empty():
            if not self._run_next(end_s):
                self._now_s = max(self._now_s, end_s)
                return
        wake_ups.get()

    def spawn(self, process: Process[Any], name: str) -> Task:
        """Start a process: it runs now until it sleeps for the first time."""
        task = _VirtualTask(self, process)
        task.wake()
        return task

    def _run_next(self, end_s: float) -> bool:
        """Run the process that is due first, if that is by `end_s`."""
        if not self._due or self._due[0][0] > end_s:
            return False
        due_s, number, task = heapq.heappop(self._due)
        if task.due_number == number:  # else it was woken before
            self._now_s = max(self._now_s, due_s)
            task.wake()
        return True

    def call_later(self, task: _VirtualTask, duration_s: float) -> None:
        """Note when a task wants to be woken."""
        task.due_number = next(self._count)
        if duration_s < math.inf:
            heapq.heappush(self._due, (self._now_s + max(0.0, duration_s), task.due_number, task))


class _VirtualTask:
    def __init__(self, time_source: VirtualTime, process: Process[Any]) -> None:
        self.due_number = -1
        self._time = time_source
        self._process = process
        self._is_awake = False
        self._is_woken = False

    @property
    def is_running(self) -> bool:
        return False

    def join(self, timeout_s: float) -> None:
        pass

    def wake(self) -> None:
        self._is_woken = True
        if self._is_awake:  # by itself, or by a signal handler that has interrupted it: it goes round once more
            return
        self._is_awake = True
        try:
            while self._is_woken:
                self._is_woken = False
                duration_s = next(self._process, math.inf)
                self._time.call_later(self, duration_s)
        finally:
            self._is_awake = False
        if self._is_woken:  # by a signal handler, after the last look
            self.wake()
