"""Ending a process that was asked to, and cannot because it waits for other processes."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection

_log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.1


def end_if_stuck(
    break_off: Callable[[], None],
    files: Collection[str],
    progress: Callable[[], int],
    *,
    patience_s: float = 3.0,
    grace_s: float = 1.0,
) -> None:
    """From a thread, watch the main one; if it waits at one place for long, break off, and end the process at last.

    Args:
        break_off: Makes transfers that wait for others fail.
        files: Source files in which a process waits for others.
        progress: Grows with what the process has done.
        patience_s: How long it may wait.
        grace_s: How long it may take to end when transfers have failed.
    """
    main = threading.main_thread()

    def waits_at() -> tuple[int, int, int] | None:
        frame = sys._current_frames().get(main.ident or 0)
        waits = frame is not None and frame.f_code.co_filename in files
        return (id(frame), frame.f_lasti, progress()) if frame is not None and waits else None

    def waits_for(seconds: float) -> bool:
        pause = threading.Event()
        before = waits_at()
        for _ in range(round(seconds / _LOOK_EVERY_S)):
            pause.wait(_LOOK_EVERY_S)
            if before is None or waits_at() != before:
                return False
        return True

    def watch() -> None:
        while not waits_for(patience_s):
            if not main.is_alive():
                return
        _log.error("SIGTERM ends this process while it waits for others, because they do not come.")
        try:
            break_off()
        except Exception:  # there may be nothing to break off
            _log.debug("Breaking off transfers failed.", exc_info=True)
        if waits_for(grace_s):
            logging.shutdown()
            os._exit(128 + signal.SIGTERM)

    threading.Thread(target=watch, name="pfo-end-if-stuck", daemon=True).start()
