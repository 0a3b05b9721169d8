"""Ending a process that was asked to, and cannot because it waits for other processes.

Python runs a handler of a signal in the main thread, between two of its instructions. A thread that waits in a
collective comes to none until the others come, so signals are heard by another thread here.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
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


def end_if_stuck(
    break_off: Callable[[], None],
    files: Collection[str],
    progress: Callable[[], int],
    ended: threading.Event,
    *,
    patience_s: float = 3.0,
    grace_s: float = 1.0,
) -> None:
    """Watch the main thread from another; if it waits at one place for long, break off, and end the process at last.

    Args:
        break_off: Makes transfers that wait for others fail.
        files: Source files in which a process waits for others.
        progress: Grows with what the process has done.
        ended: Set when there is nothing to end any more.
        patience_s: How long it may wait.
        grace_s: How long it may take to end when transfers have failed.
    """
    main = threading.main_thread()

    def waits_at() -> tuple[int, int, int] | None:
        frame = sys._current_frames().get(main.ident or 0)
        waits = frame is not None and frame.f_code.co_filename in files
        return (id(frame), frame.f_lasti, progress()) if frame is not None and waits else None

    def waits_for(seconds: float) -> bool:
        before = waits_at()
        for _ in range(round(seconds / _LOOK_EVERY_S)):
            if ended.wait(_LOOK_EVERY_S) or before is None or waits_at() != before:
                return False
        return True

    while not waits_for(patience_s):
        if ended.is_set() or not main.is_alive():
            return
    place = _place(main, files)
    _log.error("SIGTERM ends this process while it waits for others, because they do not come: %s.", place)
    try:
        break_off()
    except Exception:  # there may be nothing to break off
        _log.debug("Breaking off transfers failed.", exc_info=True)
    if waits_for(grace_s):
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
