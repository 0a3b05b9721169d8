"""The process that outlives a trainer and restores its GPU's clocks.

    python -m lightning_pfo.device.safety.watchdog BACKEND GPU_UUID PID START_TICKS SIGNALS

Started by `watching`. It sleeps until the trainer has ended, which it learns from the end of the pipe SIGNALS (at once)
or by looking (twice a second: a forked child of the trainer may hold the pipe open). If the lease is still there then,
the trainer was killed: SIGKILL, out of memory, segmentation fault.

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
import sys
import time
from pathlib import Path

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.claim import BACKENDS, undo_stale
from lightning_pfo.device.safety.guard import SIGNALS
from lightning_pfo.device.safety.lease import lease_path
from lightning_pfo.device.safety.process_id import ProcessId, process_of
from lightning_pfo.device.safety.watching import READY

logger = logging.getLogger("lightning_pfo clock watchdog")

_LOOK_EVERY_S = 0.5
_TRAINER_S = 2.0  # for the trainer to restore by itself after a signal
_RETRIES_AFTER_S = (0.2, 0.5, 1.0, 2.0)  # all within the 5 s that we promise


def main(backend: str, gpu_uuid: str, pid: str, start_ticks: str, signals: str) -> None:
    """Wait for the end of the trainer, then restore what it left."""
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # we end when the trainer does, not before
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    with contextlib.suppress(OSError):  # only root may: let the system end the trainer rather than us
        Path("/proc/self/oom_score_adj").write_text("-1000")
    received = socket.socket(fileno=int(signals))
    with contextlib.suppress(BrokenPipeError):  # killed meanwhile: there may be something to restore all the same
        os.write(sys.stdout.fileno(), READY)
    with contextlib.suppress(DeviceError, ImportError):  # now, as the disk may be gone later; it fails again then
        importlib.import_module(BACKENDS[backend]).load()
    holder = process_of(int(pid), int(start_ticks) if start_ticks else None)
    _wait_for_end(holder, received, gpu_uuid)
    if not _restore(gpu_uuid, holder):
        sys.exit(1)


def _restore(gpu_uuid: str, holder: ProcessId, *, even_alive: bool = False) -> bool:
    for retry_after_s in (*_RETRIES_AFTER_S, None):
        try:
            lease = undo_stale(gpu_uuid, holder, even_alive=even_alive, insists=True)
        except (DeviceError, OSError) as error:
            if retry_after_s is None:
                path = lease_path(gpu_uuid)
                logger.error("%s Try again with: lightning-pfo restore-clocks (lease: %s)", error, path)
                return False
            time.sleep(retry_after_s)
        else:
            if lease is not None and lease.changed:
                did = "hangs with clocks" if even_alive else "left clocks"
                which = f"{lease.gpu_name} ({gpu_uuid})"
                logger.warning("process %d %s changed; restored those of %s", holder.pid, did, which)
            return True
    return False


def _wait_for_end(holder: ProcessId, received: socket.socket, gpu_uuid: str) -> None:
    signalled_s: float | None = None
    while holder.is_alive():
        first = _first_byte(received)
        if first is None:
            signalled_s = None
            continue
        if not first:
            break
        if first[0] in SIGNALS:
            now_s = time.monotonic()
            signalled_s = signalled_s or now_s
            if now_s - signalled_s >= _TRAINER_S:
                _restore(gpu_uuid, holder, even_alive=True)
        time.sleep(_LOOK_EVERY_S / 5)
    wait_s = 0.001
    while holder.is_alive():  # a dying process closes its files a moment before it ends
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_EVERY_S)


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
