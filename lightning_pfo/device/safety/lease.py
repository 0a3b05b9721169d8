"""Leases: files that say which process has changed the clocks of which GPU, so that they can always be restored.

::

    acquire            note_change      (the driver is asked)      release
    watchdog, lease    lease rewritten  lock .. lock .. reset      lease deleted, watchdog ended
            '--- whenever the process dies in between, the watchdog or the next start undoes what the lease says

A lease is deleted only after the clocks were restored. Leases of one GPU are read and written under a file lock. They
lie in `folder.runtime_dir()`: `GPU-....json`, or `GPU-....of-USER-HOST.json` where the file of that name is another
user's or another machine's. Beside them lies a file that the watchdog keeps locked as long as it lives: so it is known
in other containers too, where process numbers are others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.folder import (
    DIRECTORY_VARIABLE,
    LOCK_TIMEOUT_S,
    explained,
    lock_file,
    read_regular,
    remove,
    runtime_dir,
    try_lock,
    write_whole,
)
from lightning_pfo.device.safety.process_id import ProcessId, pid_namespace, this_process

__all__ = ["DIRECTORY_VARIABLE", "Lease", "runtime_dir"]

logger = logging.getLogger(__name__)

VERSION = 1
GRAPHICS_CLOCK = "graphics_clock"

claimed_here: set[str] = set()
"""UUIDs of the GPUs whose clocks this program has claimed: `exec` leaves the process, not what it remembers."""


@dataclass(frozen=True)
class Lease:
    """What one process has changed on one GPU.

    Attributes:
        gpu_uuid: The driver's identifier of the GPU.
        gpu_name: Its model name, for messages.
        backend: Which backend changes it, and undoes the changes: `nvml`.
        holder: The process.
        found: State before the first change, as far as the driver tells: MHz, mW, None where it does not.
        changed: What has been changed, or was about to be: empty, or `graphics_clock`.
    """

    gpu_uuid: str
    gpu_name: str
    backend: str
    holder: ProcessId
    found: Mapping[str, int | None]
    changed: tuple[str, ...] = ()

    @property
    def is_of_earlier_program(self) -> bool:
        """Whether this process holds it, but the program that it ran before (`exec`) has claimed it."""
        return self.gpu_uuid not in claimed_here and self.holder == this_process()

    def is_held(self, folder: Path | None = None) -> bool:
        """Whether the holder still lives; where that cannot be seen, whether its watchdog does."""
        if self.holder.namespace == pid_namespace() and not self.is_of_earlier_program:
            return self.holder.is_alive()
        return is_watched(self.gpu_uuid, folder)


def lease_path(gpu_uuid: str, folder: Path | None = None) -> Path:
    """Where the lease of a GPU is, if there is one; `folder` is `runtime_dir()` unless it is given, here and below."""
    return (folder or runtime_dir()) / f"{re.sub('[^A-Za-z0-9-]', '_', gpu_uuid)}.json"


def lease_paths(gpu_uuid: str, folder: Path | None = None) -> list[Path]:
    """All leases of a GPU: of users who may not delete each other's files there are several."""
    path = lease_path(gpu_uuid, folder)
    return [path, *sorted(path.parent.glob(f"{path.stem}.of-*.json"))]


@contextmanager
def exclusive(gpu_uuid: str, folder: Path | None = None, *, insists: bool = False) -> Iterator[None]:
    """Keep other processes and threads from reading or writing the leases of a GPU meanwhile.

    Args:
        gpu_uuid: The GPU.
        folder: Where its leases are.
        insists: Go on even where the lock cannot be had: who restores must not be kept from it.

    Raises:
        DeviceError: If the folder cannot be written to, or another process keeps its lock.
    """
    path = lease_path(gpu_uuid, folder).with_suffix(".lock")
    with lock_file(path) as descriptor:
        _lock(descriptor, path, "LOCK_EX", insists=insists)
        try:
            yield
        finally:
            try_lock(descriptor, "LOCK_UN")  # closing is not enough while a forked child has a copy


@contextmanager
def watched(gpu_uuid: str, folder: Path | None = None) -> Iterator[int]:
    """A descriptor for a watchdog to inherit: as long as it lives, the GPU counts as watched in other containers."""
    path = lease_path(gpu_uuid, folder).with_suffix(".watched")
    with lock_file(path) as descriptor:
        _lock(descriptor, path, "LOCK_SH")
        yield descriptor


def is_watched(gpu_uuid: str, folder: Path | None = None) -> bool:
    """Whether a watchdog lives that watches over a lease of the GPU."""
    path = lease_path(gpu_uuid, folder).with_suffix(".watched")
    with lock_file(path) as descriptor, explained(str(path)):
        return not try_lock(descriptor, "LOCK_EX", timeout_s=0)


def _lock(descriptor: int, path: Path, flag: str, *, insists: bool = False) -> None:
    with explained(f"{path} cannot be locked"):
        is_locked = try_lock(descriptor, flag)
    if not (is_locked or insists):
        raise DeviceError(
            f"Files that remember clock changes are locked for moments only; {path} was for {LOCK_TIMEOUT_S:g} s, by "
            f"another process. Find it with `fuser {path}`, or set {DIRECTORY_VARIABLE} to a folder of your own."
        )


def read_lease(gpu_uuid: str, folder: Path | None = None) -> Lease | None:
    """Read the lease of a GPU; None if there is none. Where there are several, that of a living process.

    Raises:
        DeviceError: If a file is damaged or of another version; the message says what to do.
    """
    leases = [lease for _, lease in leases_of(gpu_uuid, folder) if not lease.holder.is_elsewhere]
    return next((lease for lease in leases if lease.is_held(folder)), leases[0] if leases else None)


def leases_of(gpu_uuid: str, folder: Path | None = None) -> list[tuple[Path, Lease]]:
    """Read all leases of a GPU, with where they are.

    Raises:
        DeviceError: If a file is damaged or of another version; the message says what to do.
    """
    read = [(path, read_file(path)) for path in lease_paths(gpu_uuid, folder)]
    return [(path, lease) for path, lease in read if lease is not None]


def read_leases(folder: Path | None = None) -> list[Lease]:
    """Read all leases of a folder; damaged ones are logged and left out."""
    leases = []
    for path in sorted((folder or runtime_dir()).glob("*.json")):
        try:
            lease = read_file(path)
        except DeviceError as error:
            logger.error("%s", error)
        else:
            leases += [lease] if lease is not None else []
    return leases


def write_lease(lease: Lease, folder: Path | None = None) -> Path:
    """Write a lease, whole or not at all; returns where.

    Raises:
        DeviceError: If it cannot be written.
    """
    path = lease_path(lease.gpu_uuid, folder)
    of_user = path.with_suffix(f".of-{os.getuid()}-{re.sub('[^A-Za-z0-9-]', '_', socket.gethostname())}.json")
    text = lease_text(lease)
    with explained(f"{path} cannot be written"):
        if not of_user.exists() and not _is_of_another_machine(path):
            try:
                write_whole(path, text)
                return path
            except PermissionError:  # another user's, in a folder where all may make files but delete only their own
                pass
        write_whole(of_user, text)
    return of_user


def lease_text(lease: Lease) -> str:
    """A lease as JSON."""
    return json.dumps({"version": VERSION} | asdict(lease), indent=1)


def lease_from(text: str) -> Lease:
    """A lease from its JSON.

    Raises:
        Exception: Of many kinds, if it is damaged or of another version.
    """
    content = json.loads(text)
    version = content.pop("version")
    if version != VERSION:
        raise ValueError(f"its version is {version}, this program reads {VERSION}")
    holder = ProcessId(**content.pop("holder"))
    return Lease(**content | {"holder": holder, "changed": tuple(content["changed"])})


def _is_of_another_machine(path: Path) -> bool:
    try:
        lease = read_file(path)
    except DeviceError:
        return False
    return lease is not None and lease.holder.is_elsewhere


def delete_lease(gpu_uuid: str, path: Path | None = None) -> None:
    """Delete a lease of a GPU, if it is there: `lease_path(gpu_uuid)`, or the one at `path`.

    Raises:
        DeviceError: If it cannot be deleted.
    """
    path = path or lease_path(gpu_uuid)
    with explained(f"{path} cannot be deleted"):
        remove(path)


def read_file(path: Path) -> Lease | None:
    """Read one lease; None if there is none.

    Raises:
        DeviceError: If it is damaged or of another version; the message says what to do.
    """
    try:
        return lease_from(read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DeviceError(
            f"A lease says who changed a GPU's clocks; {path} cannot be read: {error}. If no job uses that GPU, run "
            "nvidia-smi --reset-gpu-clocks for it and delete the file."
        ) from error
