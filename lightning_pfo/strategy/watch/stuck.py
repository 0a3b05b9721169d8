"""Ending a process that was asked to, and cannot because it waits for other processes.

Python runs a handler of a signal in the main thread, between two of its instructions. A thread that waits in a
collective comes to none until the others come, so signals are heard by another thread here.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

_log = logging.getLogger(__name__)
_END = 0  # no signal has this number
_LOOK_EVERY_S = 0.1
_TORCH = str(Path(torch.__file__).parent)
_writers: set[int] = set()


@contextmanager
def heard(signum: int, then: Callable[[], None]) -> Iterator[None]:
    """While the context is open, call `then` from a thread, once, when a signal comes that Python has a handler for.

    Args:
        signum: The signal.
        then: What is called; when the context is closed, it must come to an end.
    """
    if threading.current_thread() is not threading.main_thread():  # nobody has handlers there
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    _writers.add(writer)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def listen() -> None:
        is_called, numbers = False, b""
        while _END not in numbers:
            numbers = os.read(reader, 64)
            if before != -1:  # such as asyncio's
                with suppress(OSError):
                    os.write(before, numbers.replace(bytes([_END]), b""))
            if signum in numbers and not is_called:
                is_called = True
                then()

    thread = threading.Thread(target=listen, name="pfo-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        present = signal.set_wakeup_fd(before)
        if present != writer:  # somebody has set another since
            signal.set_wakeup_fd(present)
        _writers.discard(writer)
        os.set_blocking(writer, True)
        os.write(writer, bytes([_END]))  # to close it would not do: children such as loaders' workers have it too
        thread.join()
        os.close(writer)
        os.close(reader)


def _forget_in_child() -> None:
    """A forked child's signals are not its parent's."""
    if _writers:
        with suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


@dataclass(frozen=True)
class Waits:
    """How the main thread waits for other processes.

    Attributes:
        break_off: Makes transfers that wait for others fail.
        files: Source files in which it waits.
        progress: Grows with what the process has done.
    """

    break_off: Callable[[], None]
    files: Collection[str] = ()
    progress: Callable[[], int] = lambda: 0

    def stuck_at(self, ended: Callable[[float], object], patience_s: float, within_s: float = math.inf) -> str:
        """Wait until the main thread is at one place for long.

        Args:
            ended: Waits so many seconds; whether there is nothing to wait for any more.
            patience_s: How long it may be there.
            within_s: How long to look.

        Returns:
            The place; "" if there was none.
        """
        main = threading.main_thread()
        waited_s, before, since_s = 0.0, None, 0.0
        while not ended(_LOOK_EVERY_S) and waited_s < within_s:
            waited_s += _LOOK_EVERY_S
            now = self._at(main)
            if now is None or now != before:
                before, since_s = now, waited_s
            elif waited_s - since_s >= patience_s:
                return _place(main, self.files)
        return ""

    def _at(self, thread: threading.Thread) -> tuple[int, int, int] | None:
        frame = sys._current_frames().get(thread.ident or 0)
        waits = frame is not None and frame.f_code.co_filename in self.files
        return (id(frame), frame.f_lasti, self.progress()) if frame is not None and waits else None

    def stop(self) -> None:
        """Break off what waits for others."""
        try:
            self.break_off()
        except Exception:  # there may be nothing to break off, or the transfers may be gone already
            _log.debug("Breaking off transfers failed.", exc_info=True)


def end_if_stuck(waits: Waits, ended: threading.Event, *, patience_s: float = 3.0, grace_s: float = 1.0) -> None:
    """Watch the main thread from another; if it waits at one place for long, break off, and end the process at last.

    Args:
        waits: How it waits.
        ended: Set when there is nothing to end any more.
        patience_s: How long it may wait.
        grace_s: How long it may take to end when transfers have failed.
    """

    def has_ended(wait_s: float) -> bool:
        return ended.wait(wait_s) or not threading.main_thread().is_alive()

    place = waits.stuck_at(has_ended, patience_s)
    if not place:
        return
    _log.error("SIGTERM ends this process while it waits for others, because they do not come: %s.", place)
    waits.stop()
    if waits.stuck_at(has_ended, grace_s, grace_s + 2 * _LOOK_EVERY_S):
        logging.shutdown()
        os._exit(128 + signal.SIGTERM)


def _place(thread: threading.Thread, files: Collection[str]) -> str:
    """Who waits, and who has called that."""
    frame = sys._current_frames().get(thread.ident or 0)
    waits = "" if frame is None else frame.f_code.co_name
    while frame is not None and (frame.f_code.co_filename in files or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
    if frame is None:
        return f"it is in {waits}"
    return f"it is in {waits}, called in {frame.f_code.co_filename}, line {frame.f_lineno}"
