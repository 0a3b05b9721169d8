"""Claim the clocks of a GPU for this process, watched by a process that outlives it, and undo what others left."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.folder import all_dirs, made_again, own_dirs, runtime_dir
from lightning_pfo.device.safety.lease import (
    GRAPHICS_CLOCK,
    Lease,
    claimed_here,
    delete_lease,
    exclusive,
    is_watched,
    lease_paths,
    leases_of,
    read_file,
    watched,
    write_lease,
)
from lightning_pfo.device.safety.process_id import ProcessId, boot_id, this_process
from lightning_pfo.device.safety.watching import CHANGED, RESTORED, Watchdog

logger = logging.getLogger(__name__)

BACKENDS = {"nvml": "lightning_pfo.device.backends.nvml", "zeus": "lightning_pfo.device.backends.zeus"}
"""Modules by backend name; each has `unlock_graphics_clock(gpu_uuid, found)`, and `load()`, to import its library."""

_EARLIER_PROGRAM_S = 5.0
_LOOK_EVERY_S = 0.05


class ClockClaim:
    """This process's right to set the clocks of one GPU, from `acquire` to `release`."""

    def __init__(self, lease: Lease, path: Path, watchdog: Watchdog) -> None:
        self._lease = lease
        self._folder = path.parent  # for good: the watchdog knows no other
        self._path = path
        self._watchdog = watchdog
        self._written = _identity(path)
        self._keeps = contextlib.ExitStack()
        claimed_here.add(lease.gpu_uuid)

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
            others = [
                (path, lease)
                for path, lease in leases_of(self._lease.gpu_uuid, self._folder)
                if lease.holder != self._lease.holder and not lease.holder.is_elsewhere
            ]
            return any(path == self._path or lease.is_held(self._folder) for path, lease in others)
        except DeviceError:
            return False

    def note_change(self, what: str = GRAPHICS_CLOCK) -> None:
        """Write down that `what` is about to be changed; returns when it is on disk. Cheap when noted already.

        Raises:
            DeviceError: If nobody would restore the clocks: the watchdog has ended, or the lease is another job's now.
        """
        self._watchdog.check(self._lease.gpu_name)
        if what in self._lease.changed and _identity(self._path) == self._written:
            return
        made_again(self._folder)
        with exclusive(self._lease.gpu_uuid, self._folder):
            if self.is_taken:
                raise DeviceError(
                    f"One job at a time sets the clocks of a GPU; those of {self._lease.gpu_name} were restored by "
                    "force, and another job has claimed them since."
                )
            self._lease = replace(self._lease, changed=tuple(dict.fromkeys((*self._lease.changed, what))))
            self._path = write_lease(self._lease, self._folder)
            self._written = _identity(self._path)
            if not is_watched(self._lease.gpu_uuid, self._folder):  # the file that the watchdog has locked went, too
                self._keeps.enter_context(watched(self._lease.gpu_uuid, self._folder))
        self._watchdog.tell(CHANGED)

    def check(self) -> None:
        """Check that what was changed would still be undone; as `note_change`, if anything was changed."""
        if self.is_changed:
            self.note_change()

    def release(self) -> None:
        """Give the clocks up; whatever was changed must have been undone."""
        claimed_here.discard(self._lease.gpu_uuid)
        self._watchdog.tell(RESTORED)
        try:
            if not self.is_taken:
                delete_lease(self._lease.gpu_uuid, self._path)
        finally:
            self._keeps.close()
            self._watchdog.end()  # without a lease it has nothing to do; ending it is quicker than letting it find out


def await_earlier_program(gpu_uuid: str) -> None:
    """Where `exec` has put this program into the place of one that set clocks: until its watchdog has restored them.

    Raises:
        DeviceError: If a lease cannot be read.
    """
    deadline_s = time.monotonic() + _EARLIER_PROGRAM_S
    while time.monotonic() < deadline_s and any(
        lease.is_of_earlier_program and lease.is_held(folder)
        for folder in own_dirs()
        for _, lease in leases_of(gpu_uuid, folder)
    ):
        time.sleep(_LOOK_EVERY_S)


def check_free(gpu_uuid: str, gpu_name: str) -> None:
    """Check that no living process holds the clocks of a GPU, as far as its lease can be seen.

    Raises:
        DeviceError: If one does (the message names it), or a lease cannot be read.
    """
    for folder in own_dirs():
        for _, lease in leases_of(gpu_uuid, folder):
            if not lease.holder.is_elsewhere and lease.is_held(folder):
                raise DeviceError(
                    f"One job at a time sets the clocks of a GPU; those of {gpu_name} ({gpu_uuid}) are held by process "
                    f"{lease.holder.pid}, {_whose(lease)}. Wait until it has ended, or use another GPU."
                )


def _whose(lease: Lease) -> str:
    here = this_process()
    if lease.holder == here:
        return "this process itself"
    return "another job" if lease.holder.namespace == here.namespace else "a job in another container"


def acquire(gpu_uuid: str, gpu_name: str, backend: str, found: Mapping[str, int | None]) -> ClockClaim:
    """Claim the clocks of a GPU, after undoing what a dead holder left; returns when the watchdog is ready.

    Args:
        gpu_uuid: The GPU.
        gpu_name: Its model name, for messages.
        backend: A key of `BACKENDS`.
        found: The GPU's state now; see `Lease`.

    Raises:
        DeviceError: If a living process holds them (the message names it), or there is no place for the lease.
        ClockPermissionError: If a dead holder's changes cannot be undone.
    """
    folder = runtime_dir()
    with exclusive(gpu_uuid, folder):
        check_free(gpu_uuid, gpu_name)
        for other in own_dirs():
            _undo_all([found for found in leases_of(gpu_uuid, other) if not found[1].holder.is_elsewhere])
        lease = Lease(gpu_uuid, gpu_name, backend, this_process(), dict(found))
        watchdog = Watchdog(lease, folder)  # first, so that there is no lease that nobody watches
        try:
            claim = ClockClaim(lease, write_lease(lease, folder), watchdog)
        except BaseException:
            watchdog.end()
            raise
    try:
        watchdog.check(gpu_name)  # ready now: the first change need not wait for it then
    except BaseException:
        claim.release()
        raise
    return claim


def undo_stale(
    gpu_uuid: str,
    holder: ProcessId | None = None,
    *,
    even_alive: bool = False,
    insists: bool = False,
    folder: Path | None = None,
) -> Lease | None:
    """Restore the clocks that a dead process left changed.

    Args:
        gpu_uuid: The GPU.
        holder: Only if it was this process; None: any.
        even_alive: Also if it still lives.
        insists: Also while another process keeps the lock of the leases.
        folder: Where the leases are; `runtime_dir()` unless it is given.

    Returns:
        The lease that was undone and deleted; None if there was nothing to do.

    Raises:
        DeviceError: If the GPU refuses; the lease stays.
    """
    folder = folder or runtime_dir()
    if not any(map(os.path.lexists, lease_paths(gpu_uuid, folder))):
        return None  # nothing to lock for
    with exclusive(gpu_uuid, folder, insists=insists):
        stale = [
            (path, lease)
            for path, lease in leases_of(gpu_uuid, folder)
            if not lease.holder.is_elsewhere
            and (holder is None or lease.holder == holder)
            and (even_alive or not lease.is_held(folder))
        ]
        _undo_all(stale)
        return stale[0][1] if stale else None


def undo_lost(lease: Lease) -> bool:
    """Restore the clocks that a dead process left changed and whose lease is gone, unless another one has claimed them.

    Returns:
        Whether they were restored.

    Raises:
        DeviceError: If the GPU refuses.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(DeviceError):  # the folder may be gone with the lease
            stack.enter_context(exclusive(lease.gpu_uuid, insists=True))
        try:
            is_anothers = _is_held_by_another(lease)
        except DeviceError:
            is_anothers = False
        if not is_anothers:
            _unlock(lease)
    return not is_anothers


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


def _undo_all(leases: list[tuple[Path, Lease]]) -> None:
    """Undo what leases say and delete them; a reboot has undone it before. Call inside `exclusive`.

    The GPU is not touched while another process holds it. A lease that another user has left where nobody else may
    delete it is undone, and stays.
    """
    for path, lease in leases:
        if lease.changed and lease.holder.boot_id == boot_id() and not _is_held_by_another(lease):
            _unlock(lease)
        try:
            delete_lease(lease.gpu_uuid, path)
        except DeviceError as error:
            if not isinstance(error.__cause__, PermissionError):
                raise
            logger.warning(
                "The lease %s of user number %d is undone, but only they or root may delete it: sudo lightning-pfo "
                "restore-clocks all=true",
                path,
                path.stat().st_uid,
            )


def _unlock(lease: Lease) -> None:
    if lease.backend not in BACKENDS:
        raise DeviceError(f"Clocks are restored by one of {', '.join(BACKENDS)}; the lease names {lease.backend!r}.")
    importlib.import_module(BACKENDS[lease.backend]).unlock_graphics_clock(lease.gpu_uuid, lease.found)


def _is_held_by_another(lease: Lease) -> bool:
    """Whether a living process has claimed the GPU of a lease that is to be undone; leases of others as far as seen."""
    for folder in all_dirs():
        for path in lease_paths(lease.gpu_uuid, folder):
            with contextlib.suppress(DeviceError):
                other = read_file(path)
                if other is not None and other.holder != lease.holder and other.is_held(folder):
                    return True
    return False


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a file from those that take its place; None if there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns
