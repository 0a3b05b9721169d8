"""The process that outlives a trainer and restores its GPU's clocks: `python -m ... GPU_UUID PID START_TICKS`.

Started by `claim.acquire`. It sleeps until the trainer has ended, which it learns from the end of its standard
input (at once) or by looking (twice a second: a forked child of the trainer may hold the pipe open). If the lease is
still there then, the trainer was killed: SIGKILL, out of memory, segmentation fault.
"""

from __future__ import annotations

import logging
import select
import signal
import sys
import time

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.claim import undo_stale
from lightning_pfo.device.safety.lease import lease_path
from lightning_pfo.device.safety.process_id import ProcessId, boot_id, pid_namespace

logger = logging.getLogger("lightning_pfo clock watchdog")

_LOOK_EVERY_S = 0.5
_RETRIES_AFTER_S = (0.2, 0.5, 1.0, 2.0)  # all within the 5 s that we promise


def main(gpu_uuid: str, pid: str, start_ticks: str) -> None:
    """Wait for the end of the trainer, then restore what it left."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # we end when the trainer does, not before
    holder = ProcessId(int(pid), int(start_ticks) if start_ticks else None, boot_id(), pid_namespace())
    _wait_for_end(holder)
    path = lease_path(gpu_uuid)
    for retry_after_s in (*_RETRIES_AFTER_S, None):
        try:
            lease = undo_stale(gpu_uuid, holder)
        except (DeviceError, OSError) as error:
            if retry_after_s is None:
                logger.error("%s Try again with: lightning-pfo restore-clocks (lease: %s)", error, path)
                sys.exit(1)
            time.sleep(retry_after_s)
        else:
            if lease is not None and lease.changed:
                which = f"{lease.gpu_name} ({gpu_uuid})"
                logger.warning("process %s left clocks changed; restored those of %s", pid, which)
            return


def _wait_for_end(holder: ProcessId) -> None:
    while holder.is_alive():
        if select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
            break
    wait_s = 0.001
    while holder.is_alive():  # a dying process closes its files a moment before it ends
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, _LOOK_EVERY_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
