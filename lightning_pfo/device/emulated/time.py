"""Time as the emulated GPU sees it, so that tests can replace it by one that costs nothing."""

from __future__ import annotations

import contextlib
import queue
import time
from typing import Protocol


class TimeSource(Protocol):
    """A clock that can be waited for."""

    def now_s(self) -> float:
        """Seconds since some fixed moment; never decreases."""

    def wait(self, wake_ups: queue.SimpleQueue[None], timeout_s: float) -> None:
        """Return after `timeout_s`, or as soon as something is put into `wake_ups`."""


_OVERSLEEP_S = 0.0003  # what waking from a timed wait costs on a busy machine
_SPIN_S = 0.00015


class RealTime:
    """The system's monotonic clock.

    A waiting queue is safe against signal handlers, where a `Condition` is not. As timed waits return a few tenths of a
    millisecond late, the last of them is slept separately and the end spun: about 1 % of a core for instructions
    of tens of milliseconds.
    """

    def now_s(self) -> float:
        """Seconds of the clock that `time.perf_counter` reads."""
        return time.perf_counter()

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
