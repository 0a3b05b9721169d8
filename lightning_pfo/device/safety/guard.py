"""Close what changed GPU clocks, however the process ends: at exit, on an exception, on SIGINT, SIGTERM and SIGHUP.

While anything is registered, our signal handlers stand before those they replaced and call them afterwards. They are
removed with the last registration. (SIGKILL cannot be caught.)
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from types import FrameType
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Closeable(Protocol):
    """Something whose `close` restores clocks; it may be called twice and must be safe in a signal handler."""

    def close(self) -> None:
        """Restore."""


_registered: list[Closeable] = []
_owner_pid = 0
_replaced_handlers: dict[int, Any] = {}
_handling: set[int] = set()


def register(closeable: Closeable) -> None:
    """Close `closeable` when the process ends or receives a signal, unless it is unregistered before.

    Signals are caught only if this is the main thread (Python allows no other to install handlers); the exit always.
    """
    global _owner_pid
    if _owner_pid != os.getpid():  # a forked child must not restore what its parent still uses
        _registered.clear()
        _owner_pid = os.getpid()
    _registered.append(closeable)
    if threading.current_thread() is threading.main_thread():
        _install_handlers()


def unregister(closeable: Closeable) -> None:
    """Forget `closeable`; unknown ones are ignored."""
    _registered[:] = [known for known in _registered if known is not closeable]
    if not _registered and threading.current_thread() is threading.main_thread():
        _remove_handlers()


def _install_handlers() -> None:
    for signum in _SIGNALS:
        current = signal.getsignal(signum)
        # An ignored signal does not end the process; a handler of None belongs to C code and could not be put back.
        if current not in (_on_signal, signal.SIG_IGN, None):
            _replaced_handlers[signum] = current
            signal.signal(signum, _on_signal)


def _remove_handlers() -> None:
    for signum in tuple(_replaced_handlers):
        if signal.getsignal(signum) is _on_signal:  # else somebody has replaced ours since, and may call it
            signal.signal(signum, _replaced_handlers.pop(signum))


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if signum in _handling:  # the signal came twice, or the replaced handler calls us
        return
    _handling.add(signum)
    try:
        is_outermost = signal.getsignal(signum) is _on_signal  # else a handler that called us decides what happens next
        replaced = _replaced_handlers.get(signum)  # before closing, which removes the handlers
        _close_all()
        if callable(replaced):
            replaced(signum, frame)
        elif is_outermost:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
    finally:
        _handling.discard(signum)


def _close_all() -> None:
    if _owner_pid != os.getpid():
        return
    for closeable in tuple(_registered):
        try:
            closeable.close()
        except Exception:
            logger.exception("Restoring GPU clocks failed.")
        unregister(closeable)


atexit.register(_close_all)
