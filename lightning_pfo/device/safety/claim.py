"""Claim the clocks of a GPU for this process, watched by a process that outlives it, and undo what others left."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import lightning_pfo
from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.lease import (
    DIRECTORY_VARIABLE,
    GRAPHICS_CLOCK,
    Lease,
    delete_lease,
    exclusive,
    lease_path,
    read_lease,
    runtime_dir,
    watched,
    write_lease,
)
from lightning_pfo.device.safety.process_id import ProcessId, boot_id, this_process

logger = logging.getLogger(__name__)

BACKENDS = {"nvml": "lightning_pfo.device.backends.nvml", "zeus": "lightning_pfo.device.backends.zeus"}
"""Modules by backend name; each has `unlock_graphics_clock(gpu_uuid, found)`."""


class ClockClaim:
    """This process's right to set the clocks of one GPU, from `acquire` to `release`."""

    def __init__(self, lease: Lease, watchdog: subprocess.Popen[bytes]) -> None:
        self._lease = lease
        self._watchdog = watchdog
        self._path = lease_path(lease.gpu_uuid)
        self._written = _identity(self._path)

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that acquired it, not one forked from it."""
        return self._lease.holder.pid == os.getpid()

    @property
    def is_changed(self) -> bool:
        """Whether there is something to undo before `release`."""
        return bool(self._lease.changed)

    @property
    def found(self) -> Mapping[str, int | None]:
        """The GPU's state when it was acquired; see `Lease`."""
        return self._lease.found

    @property
    def is_taken(self) -> bool:
        """Whether somebody else holds the clocks now, after `lightning-pfo restore-clocks force=true`."""
        try:
            lease = read_lease(self._lease.gpu_uuid)
        except DeviceError:
            return False
        return lease is not None and lease.holder != self._lease.holder

    def note_change(self, what: str = GRAPHICS_CLOCK) -> None:
        """Write down that `what` is about to be changed; returns when it is on disk. Cheap when noted already.

        Raises:
            DeviceError: If nobody would restore the clocks: the watchdog has ended, or the lease is another job's now.
        """
        if self._watchdog.poll() is not None:
            raise DeviceError(
                f"Clocks are changed only under a watchdog process that can restore them; that of "
                f"{self._lease.gpu_name} has ended (code {self._watchdog.returncode}). Start the job again."
            )
        if what in self._lease.changed and _identity(self._path) == self._written:
            return
        with exclusive(self._lease.gpu_uuid):
            if self.is_taken:
                raise DeviceError(
                    f"One job at a time sets the clocks of a GPU; those of {self._lease.gpu_name} were restored by "
                    "force, and another job has claimed them since."
                )
            self._lease = replace(self._lease, changed=tuple(dict.fromkeys((*self._lease.changed, what))))
            write_lease(self._lease)
            self._written = _identity(self._path)

    def release(self) -> None:
        """Give the clocks up; whatever was changed must have been undone."""
        if not self.is_taken:
            delete_lease(self._lease.gpu_uuid)
        # Without a lease the watchdog has nothing to do; ending it is quicker than letting it find out.
        self._watchdog.kill()
        self._watchdog.communicate()


def acquire(gpu_uuid: str, gpu_name: str, backend: str, found: Mapping[str, int | None]) -> ClockClaim:
    """Claim the clocks of a GPU, after undoing what a dead holder left.

    Args:
        gpu_uuid: The GPU.
        gpu_name: Its model name, for messages.
        backend: A key of `BACKENDS`.
        found: The GPU's state now; see `Lease`.

    Raises:
        DeviceError: If a living process holds them (the message names it), or there is no place for the lease.
        ClockPermissionError: If a dead holder's changes cannot be undone.
    """
    with exclusive(gpu_uuid):
        previous = read_lease(gpu_uuid)
        if previous is not None:
            if previous.is_held():
                same_container = previous.holder.namespace == this_process().namespace
                whose = "another job" if same_container else "a job in another container"
                whose = "this process itself" if previous.holder == this_process() else whose
                raise DeviceError(
                    f"One job at a time sets the clocks of a GPU; those of {gpu_name} ({gpu_uuid}) are held by process "
                    f"{previous.holder.pid}, {whose}. Wait until it has ended, or use another GPU."
                )
            _undo(previous)
        lease = Lease(gpu_uuid, gpu_name, backend, this_process(), dict(found))
        watchdog = _start_watchdog(lease)  # first, so that there is no lease that nobody watches
        try:
            write_lease(lease)
        except BaseException:
            watchdog.kill()
            watchdog.communicate()
            raise
        return ClockClaim(lease, watchdog)


def undo_stale(gpu_uuid: str, holder: ProcessId | None = None, *, even_alive: bool = False) -> Lease | None:
    """Restore the clocks that a dead process left changed.

    Args:
        gpu_uuid: The GPU.
        holder: Only if it was this process; None: any.
        even_alive: Also if it still lives.

    Returns:
        The lease that was undone and deleted; None if there was nothing to do.

    Raises:
        DeviceError: If the GPU refuses; the lease stays.
    """
    with exclusive(gpu_uuid):
        lease = read_lease(gpu_uuid)
        if lease is None or (holder is not None and lease.holder != holder):
            return None
        if lease.is_held() and not even_alive:
            return None
        _undo(lease)
        return lease


def repair_at_start(gpu_uuid: str) -> None:
    """When a GPU is opened: undo what a crashed job left, or say who can."""
    try:
        lease = undo_stale(gpu_uuid)
    except (DeviceError, OSError) as error:
        logger.warning("A crashed job may have left the clocks of %s locked: %s", gpu_uuid, error)
        return
    if lease is not None and lease.changed:
        logger.warning(
            "Restored the clocks of %s (%s), which the crashed process %d had left locked.",
            lease.gpu_name,
            gpu_uuid,
            lease.holder.pid,
        )


def _undo(lease: Lease) -> None:
    """Undo what the lease says and delete it; a reboot has undone it before. Call inside `exclusive`."""
    if lease.changed and lease.holder.boot_id == boot_id():
        if lease.backend not in BACKENDS:
            raise DeviceError(
                f"Clocks are restored by one of {', '.join(BACKENDS)}; the lease names {lease.backend!r}."
            )
        importlib.import_module(BACKENDS[lease.backend]).unlock_graphics_clock(lease.gpu_uuid, lease.found)
    delete_lease(lease.gpu_uuid)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from those that take its place; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns


def _start_watchdog(lease: Lease) -> subprocess.Popen[bytes]:
    holder = lease.holder
    search_path = [str(Path(lightning_pfo.__file__).parents[1]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {
        DIRECTORY_VARIABLE: str(runtime_dir()),
        "PYTHONPATH": os.pathsep.join(str(Path(entry).absolute()) for entry in search_path if entry),
    }
    start_ticks = "" if holder.start_ticks is None else str(holder.start_ticks)
    command = [sys.executable, "-m", "lightning_pfo.device.safety.watchdog"]
    try:
        with watched(lease.gpu_uuid) as descriptor:
            return subprocess.Popen(
                [*command, lease.gpu_uuid, str(holder.pid), start_ticks],
                stdin=subprocess.PIPE,  # nothing is ever written: its end means that we have ended
                stdout=subprocess.DEVNULL,
                env=environment,
                cwd="/",  # a job's folder may be unmounted, and may hold modules named like Python's own
                pass_fds=(descriptor,),
                start_new_session=True,  # so that Ctrl-C and batch systems do not end both at once
            )
    except OSError as error:
        raise DeviceError(
            f"Clocks are changed only under a watchdog process that can restore them; it could not be started: {error}."
        ) from error
