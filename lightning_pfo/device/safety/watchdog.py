"""The process that outlives a trainer and restores its GPU's clocks.

    python -m lightning_pfo.device.safety.watchdog LEASE SIGNALS

Started by `watching`. It sleeps until the trainer has ended, which it learns from the end of the pipe SIGNALS (at once)
or by looking (twice a second: a forked child of the trainer may hold the pipe open). If the lease is still there then,
the trainer was killed: SIGKILL, out of memory, segmentation fault; or `exec` has put another program into its place.
The trainer says on the standard input that it changes clocks, as the lease may be removed with its folder.

The kernel writes the signals that the trainer receives into that pipe, whatever Python does (`guard`). A trainer that
has not restored the clocks some time after SIGTERM hangs in a call of C that keeps the interpreter: then the watchdog
does, while it lives.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import select
import signal
import socket
import stat
import sys
import time
from pathlib import Path

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.claim import BACKENDS, undo_lost, undo_stale
from lightning_pfo.device.safety.folder import DIRECTORY_VARIABLE
from lightning_pfo.device.safety.guard import SIGNALS
from lightning_pfo.device.safety.lease import Lease, lease_from, lease_path, lease_paths
from lightning_pfo.device.safety.watching import CHANGED, READY

logger = logging.getLogger("lightning_pfo clock watchdog")

_LOOK_EVERY_S = 0.5
_TRAINER_S = 2.0  # for the trainer to restore by itself after a signal
_RETRIES_AFTER_S = (0.2, 0.5, 1.0, 2.0)  # all within the 5 s that we promise
_LATER_RETRIES_AFTER_S = (5.0, *(10.0,) * 59)  # of a driver that takes longer: a GPU under reset, say
_TELLS_S = 30.0  # for so long whoever reads what we say through a pipe waits for its end


class _Trainer:
    """What the trainer has told about its clocks, which holds where its lease is lost."""

    def __init__(self, lease: Lease, told: int) -> None:
        os.set_blocking(told, False)
        self.lease = lease
        self._told = told
        self._is_changed = False
        self._lies_there = False  # whether the lease did when it could not be undone

    def restore(self, *, hangs: bool = False) -> bool:
        """Undo what it has changed; returns whether nothing is left."""
        lease = self.lease
        later_s = () if hangs else _LATER_RETRIES_AFTER_S  # a trainer that lives is looked at again
        tells_until_s = time.monotonic() + _TELLS_S
        for retry_after_s in (*_RETRIES_AFTER_S, *later_s, None):
            try:
                is_restored = self._undo()
            except (DeviceError, OSError) as error:
                self._lies_there = any(map(os.path.lexists, lease_paths(lease.gpu_uuid, _folder())))
                if retry_after_s is None:
                    where = f"(lease: {lease_path(lease.gpu_uuid, _folder())})"
                    logger.error("%s Try again with: lightning-pfo restore-clocks %s", error, where)
                    return False
                if (retry_after_s,) == later_s[:1]:
                    logger.warning("%s It is tried again for %.0f minutes.", error, sum(later_s) / 60)
                if time.monotonic() > tells_until_s:
                    _let_go_of_readers()
                time.sleep(retry_after_s)
            else:
                if is_restored:
                    did = "hangs with clocks" if hangs else "left clocks"
                    which = f"{lease.gpu_name} ({lease.gpu_uuid})"
                    logger.warning("process %d %s changed; restored those of %s", lease.holder.pid, did, which)
                return True
        return False

    def _undo(self) -> bool:
        """Whether there was something to undo."""
        self._listen()
        undone = None
        if _folder().is_dir():
            # even if the process lives: it hangs, or `exec` has put another program into its place
            undone = undo_stale(self.lease.gpu_uuid, self.lease.holder, even_alive=True, insists=True)
        is_lost = self._is_changed and not (self._lies_there and _folder().is_dir())  # else restored by others
        was_changed = bool(undone.changed) if undone is not None else is_lost and undo_lost(self.lease)
        self._is_changed = False
        return was_changed

    def _listen(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while told := os.read(self._told, 4096):
                self._is_changed = told.endswith(CHANGED)


def main(lease: str, signals: str) -> None:
    """Wait for the end of the trainer, then restore what it left."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # we end when the trainer does, not before
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with contextlib.suppress(OSError):  # only root may: let the system end the trainer rather than us
        Path("/proc/self/oom_score_adj").write_text("-1000")
    received = socket.socket(fileno=int(signals))
    trainer = _Trainer(lease_from(lease), sys.stdin.fileno())
    with contextlib.suppress(BrokenPipeError):  # killed meanwhile: there may be something to restore all the same
        os.write(sys.stdout.fileno(), READY)
    with contextlib.suppress(DeviceError, ImportError):  # now, as the disk may be gone later; it fails again then
        importlib.import_module(BACKENDS[trainer.lease.backend]).load()
    _wait_for_end(trainer, received)
    if not trainer.restore():
        sys.exit(1)


def _folder() -> Path:
    """Where the lease is."""
    return Path(os.environ[DIRECTORY_VARIABLE])


def _let_go_of_readers() -> None:
    """Say no more to a pipe: `... 2>&1 | tee log`, or a program that runs the trainer, waits for its last writer."""
    if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
        logger.warning("This goes on in silence. Whether it has worked: lightning-pfo restore-clocks")
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stderr.fileno())


def _wait_for_end(trainer: _Trainer, received: socket.socket) -> None:
    signalled_s: float | None = None
    while trainer.lease.holder.is_alive():
        first = _first_byte(received)
        if first is None:
            signalled_s = None
            continue
        if not first:
            return  # nobody is left there who could set a clock
        if first[0] in SIGNALS:
            now_s = time.monotonic()
            signalled_s = signalled_s or now_s
            if now_s - signalled_s >= _TRAINER_S:
                trainer.restore(hangs=True)
        time.sleep(_LOOK_EVERY_S / 5)


def _first_byte(received: socket.socket) -> bytes | None:
    """Look at it, and leave it there; None if there is none for a while, empty at the end."""
    if not select.select([received], [], [], _LOOK_EVERY_S)[0]:
        return None
    try:
        return received.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # the trainer takes it out when it has acted, as it just has
        return None


if __name__ == "__main__":
    main(*sys.argv[1:])
