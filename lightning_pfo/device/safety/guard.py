"""Close what changed GPU clocks, however the process ends: at exit, on an exception, on SIGINT, SIGTERM and SIGHUP.

While anything is registered, our signal handlers stand before those they replaced and call them afterwards. They are
removed with the last registration. (SIGKILL cannot be caught.)

Python calls handlers between two of its own instructions, so not while the main thread is inside a call of C: a rank
that hangs in a collective. The kernel's part is prompt, and writes the number of the signal into a pipe::

    kernel -> signals_received() -> thread     closes what may be closed from any thread, then takes the number out
                                 -> watchdog   restores if the number stays, as no thread runs: C keeps the interpreter
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

logger = logging.getLogger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_STOP = b"\0"
_OTHER_THREAD_S = 10.0  # for what another thread closes already
_LOOK_EVERY_S = 0.001


class Closeable(Protocol):
    """Something whose `close` restores clocks; it may be called twice and must be safe in a signal handler."""

    def close(self) -> None:
        """Restore."""


@dataclass(eq=False)
class _Registration:
    closeable: Closeable
    any_thread: bool
    closers: list[int] = field(default_factory=list)  # threads; the first one closes (appending needs no lock)
    is_closed: bool = False


_registered: list[_Registration] = []
_owner_pid = 0
_replaced_handlers: dict[int, Any] = {}
_handling: set[int] = set()
_pipe: tuple[socket.socket, socket.socket] | None = None
_replaced_pipe = -1
_listener: threading.Thread | None = None


def register(closeable: Closeable, *, any_thread: bool = False) -> None:
    """Close `closeable` when the process ends or receives a signal, unless it is unregistered before.

    Signals are caught only if this is the main thread (Python allows no other to install handlers); the exit always.

    Args:
        closeable: What to close.
        any_thread: Whether another thread may close it, while the main one does anything at all.
    """
    global _owner_pid
    if _owner_pid != os.getpid():  # a forked child must not restore what its parent still uses
        _registered.clear()
        _owner_pid = os.getpid()
    _registered.append(_Registration(closeable, any_thread))
    if threading.current_thread() is threading.main_thread():
        _install_handlers()
        if any_thread:
            _listen()


def unregister(closeable: Closeable) -> None:
    """Forget `closeable`; unknown ones are ignored."""
    _registered[:] = [known for known in _registered if known.closeable is not closeable]
    if not _registered:
        _stop_listening()
        if threading.current_thread() is threading.main_thread():
            _remove_handlers()


def signals_received() -> socket.socket:
    """Where the numbers of signals can be read, one byte each, while anything is registered for any thread.

    Watchdogs look without taking anything out. The other end is closed when this process ends.
    """
    global _pipe
    if _pipe is None:
        _pipe = socket.socketpair()
        for end in _pipe:
            end.setblocking(False)
    return _pipe[0]


def _install_handlers() -> None:
    for signum in SIGNALS:
        current = signal.getsignal(signum)
        # An ignored signal does not end the process; a handler of None belongs to C code and could not be put back.
        if current not in (_on_signal, signal.SIG_IGN, None):
            _replaced_handlers[signum] = current
            signal.signal(signum, _on_signal)


def _remove_handlers() -> None:
    global _replaced_pipe
    for signum in tuple(_replaced_handlers):
        if signal.getsignal(signum) is _on_signal:  # else somebody has replaced ours since, and may call it
            signal.signal(signum, _replaced_handlers.pop(signum))
    if _pipe is not None:
        present = signal.set_wakeup_fd(_replaced_pipe)
        if present != _pipe[1].fileno():  # somebody else's since, such as an event loop's
            signal.set_wakeup_fd(present)
        _replaced_pipe = -1


def _listen() -> None:
    """Have the kernel tell a thread of signals."""
    global _listener, _replaced_pipe
    received = signals_received()
    assert _pipe is not None
    if _listener is None or not _listener.is_alive():
        with contextlib.suppress(BlockingIOError):
            while received.recv(4096):  # of earlier runs
                pass
        _listener = threading.Thread(target=_close_on_signals, args=(received,), name="pfo-signals", daemon=True)
        _listener.start()
    replaced = signal.set_wakeup_fd(_pipe[1].fileno(), warn_on_full_buffer=False)
    if replaced not in (-1, _pipe[1].fileno()):
        _replaced_pipe = replaced


def _stop_listening() -> None:
    if _pipe is not None and _listener is not None and _listener.is_alive() and _owner_pid == os.getpid():
        with contextlib.suppress(OSError):
            _pipe[1].send(_STOP)


def _close_on_signals(received: socket.socket) -> None:
    while True:
        select.select([received], [], [])
        byte = received.recv(1, socket.MSG_PEEK)
        if byte and byte[0] in SIGNALS:
            _close_all(any_thread=True)
        received.recv(1)
        if byte in (b"", _STOP):
            if not _registered:
                return
        elif _replaced_pipe != -1:
            with contextlib.suppress(OSError):
                os.write(_replaced_pipe, byte)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if signum in _handling:  # the signal came twice, or the replaced handler calls us
        return
    _handling.add(signum)
    try:
        is_outermost = signal.getsignal(signum) is _on_signal  # else a handler that called us decides what happens next
        replaced = _replaced_handlers.get(signum)  # before closing, which removes the handlers
        _close_all()
        if not _registered:
            _remove_handlers()
        if callable(replaced):
            replaced(signum, frame)
        elif is_outermost:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
    finally:
        _handling.discard(signum)


def _close_all(*, any_thread: bool = False) -> None:
    if _owner_pid != os.getpid():
        return
    for registration in tuple(_registered):
        if registration.any_thread or not any_thread:
            _close(registration)


def _close(registration: _Registration) -> None:
    registration.closers.append(threading.get_ident())
    if registration.closers[0] != threading.get_ident():
        deadline_s = time.monotonic() + _OTHER_THREAD_S
        while not registration.is_closed and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S)
        return
    try:
        registration.closeable.close()
    except Exception:
        logger.exception("Restoring GPU clocks failed.")
    registration.is_closed = True
    unregister(registration.closeable)


def _forget_in_a_fork() -> None:
    """A forked child's signals are not its parent's, nor is what it waits for."""
    global _pipe, _listener
    if _pipe is None:
        return
    with contextlib.suppress(ValueError):
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, _pipe[1].fileno()):
            signal.set_wakeup_fd(present)
    for end in _pipe:
        end.close()
    _pipe = _listener = None


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forget_in_a_fork)
atexit.register(_close_all)
