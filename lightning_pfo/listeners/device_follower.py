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

_CLOSE_TIMEOUT_S = 1.0


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


def cuda_device_index() -> int | None:
    """CUDA's index of the GPU that this thread computes on; None if this process does not use CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_device()


def _recorded(enable_timing: bool) -> DeviceMark | None:
    if cuda_device_index() is None:
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

    A failure of the device or of an action ends it; training goes on.

    Attributes:
        is_deferred: Whether actions run later, on the follower's thread; known from the first action on.
        error: What ended it. None while all is well.
    """

    def __init__(
        self, record: Recorder = record_mark, on_failure: Callable[[Exception], object] = lambda _: None
    ) -> None:
        """Start nothing yet; the first deferred action starts the thread.

        Args:
            record: Puts marks into the device's work.
            on_failure: Called once with what fails, on the thread where it does.
        """
        self._record = record
        self._on_failure = on_failure
        self.is_deferred = False
        self.error: Exception | None = None
        self._waiting: queue.SimpleQueue[tuple[DeviceMark, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def has_ended(self) -> bool:
        """Whether no action will run any more."""
        return self._is_closed or self.error is not None

    def when_reached(self, action: Callable[[], object]) -> None:
        """Run `action` when the device gets here; returns at once. Call it on the thread that launches the work."""
        if self.has_ended:
            return
        try:
            mark = self._record()
            if mark is None:
                action()
                return
        except Exception as error:
            self._fail(error)
            return
        if self._thread is None:
            self.is_deferred = True
            self._thread = threading.Thread(
                target=self._work, args=(cuda_device_index(),), name="pfo-device-follower", daemon=True
            )
            self._thread.start()
        self._waiting.put((mark, action))

    def close(self) -> None:
        """Drop the actions that are still to come. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self._waiting.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            # a thread that the end of the interpreter finds inside a CUDA call would abort the process
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _work(self, device_index: int | None) -> None:
        try:
            if device_index is not None:
                torch.cuda.set_device(device_index)  # else waiting takes memory of GPU 0, where new threads start
            while (item := self._waiting.get()) is not None:
                mark, action = item
                mark.synchronize()
                if self._is_closed:
                    return
                action()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.error = error  # training learns of a failed device by itself
        if not self._is_closed:
            logger.error("Nothing is timed or set by the GPU's progress any more: %s", error)
            self._on_failure(error)
