"""Do something when the GPU gets there, not when the host has launched the work.

On CUDA the host runs ahead: when it reports the end of an instruction, the GPU may not have begun it. So a mark is put
into the stream, and a thread of its own sleeps until the GPU has passed it::

    training thread   launch F0 | launch B0 |  ...            never waits
    stream               ..... F0 ..... mark | ..... B0 ..... mark
    follower thread                     action                action

Where the host waits for the work anyway (training on the CPU, emulated GPUs), actions run at once.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class DeviceMark(Protocol):
    """A place in the work of a device, as a recorded `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Sleep, without holding the interpreter, until the device has got there."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from here to another mark, both reached and recorded with timing."""


Recorder = Callable[[], "DeviceMark | None"]
"""Puts a mark behind the work launched so far; None where the host waits for that work anyway."""


def record_mark() -> DeviceMark | None:
    """A mark in the current CUDA stream; None if this process does not use CUDA."""
    return _recorded(enable_timing=False)


def record_timed_mark() -> DeviceMark | None:
    """A mark that knows its time; see `record_mark`."""
    return _recorded(enable_timing=True)


def _recorded(enable_timing: bool) -> DeviceMark | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    # blocking: a thread that waits for it sleeps instead of spinning
    event: Any = torch.cuda.Event(enable_timing=enable_timing, blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    mark: DeviceMark = event
    return mark


def no_mark() -> DeviceMark | None:
    """The `Recorder` for emulated GPUs: their work is over when the host says so, even if torch uses CUDA."""
    return None


class DeviceFollower:
    """Runs actions in order, each when the device has done all work that was launched before it was handed over.

    Attributes:
        is_deferred: Whether actions run later, on the follower's thread; known from the first action on.
        error: What ended it: a failure of the device, or of an action. None while all is well.
    """

    def __init__(self, record: Recorder = record_mark) -> None:
        """Start nothing yet; the first deferred action starts the thread."""
        self._record = record
        self.is_deferred = False
        self.error: Exception | None = None
        self._waiting: queue.SimpleQueue[tuple[DeviceMark, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def when_reached(self, action: Callable[[], object]) -> None:
        """Run `action` when the device gets here; returns at once. Call it on the thread that launches the work."""
        mark = self._record()
        if mark is None:
            action()
            return
        if self._thread is None:
            self.is_deferred = True
            self._thread = threading.Thread(target=self._work, name="pfo-device-follower", daemon=True)
            self._thread.start()
        if self.error is None and not self._is_closed:
            self._waiting.put((mark, action))

    def close(self) -> None:
        """Drop the actions that are still to come. May be called twice."""
        self._is_closed = True
        self._waiting.put(None)

    def _work(self) -> None:
        try:
            while (item := self._waiting.get()) is not None:
                mark, action = item
                mark.synchronize()
                if self._is_closed:
                    return
                action()
        except Exception as error:  # surfaces as `error`; training learns of a failed device by itself
            self.error = error
            if not self._is_closed:
                logger.error("Nothing is timed by the GPU's progress any more: %s", error)
