"""Leases: files that say which process has changed the clocks of which GPU, so that they can always be restored.

::

    acquire            note_change      (the driver is asked)      release
    watchdog, lease    lease rewritten  lock .. lock .. reset      lease deleted, watchdog ended
            '--- whenever the process dies in between, the watchdog or the next start undoes what the lease says

A lease is deleted only after the clocks were restored. Leases of one GPU are read and written under a file lock. They
lie in `runtime_dir()`, one per GPU: `GPU-....json`. Beside it lies a file that the watchdog keeps locked as long as it
lives: so it is known in other containers too, where process numbers are others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.process_id import ProcessId, pid_namespace

logger = logging.getLogger(__name__)

VERSION = 1
DIRECTORY_VARIABLE = "LIGHTNING_PFO_RUNTIME_DIR"
_READABLE = 0o644  # by other users who share the folder, whatever the umask: they must see who holds a GPU
GRAPHICS_CLOCK = "graphics_clock"


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

    def is_held(self) -> bool:
        """Whether the holder still lives; where it runs in another container, whether its watchdog does."""
        if self.holder.namespace == pid_namespace():
            return self.holder.is_alive()
        return _is_watched(self.gpu_uuid)


def runtime_dir() -> Path:
    """The folder of leases: the same for all jobs of a user on this machine, and private.

    LIGHTNING_PFO_RUNTIME_DIR, if set (let jobs of several users or containers share a folder by it); else for root
    /run/lightning-pfo; else a folder in XDG_RUNTIME_DIR or, named by the user's number, among the temporary files.

    Raises:
        DeviceError: If it cannot be made, belongs to somebody else, or is given relative to the present folder.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given and not Path(given).is_absolute():
        raise DeviceError(
            f"{DIRECTORY_VARIABLE} is an absolute path, as jobs share the folder; got {given!r}. Use "
            f"{str(Path(given).absolute())!r}."
        )
    if given:
        folder = Path(given)
    elif os.getuid() == 0 and os.access("/run", os.W_OK):
        folder = Path("/run/lightning-pfo")
    elif os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "lightning-pfo"
    else:
        folder = Path(tempfile.gettempdir()) / f"lightning-pfo-{os.getuid()}"
    with _explained(f"{folder} cannot be made"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = bool(given) or folder.lstat().st_uid == os.getuid()
    if not is_ours:
        raise DeviceError(
            f"The folder that remembers clock changes must belong to this user; {folder} belongs to user number "
            f"{folder.lstat().st_uid}. Set {DIRECTORY_VARIABLE} to a folder of your own."
        )
    return folder


def lease_path(gpu_uuid: str) -> Path:
    """Where the lease of a GPU is, if there is one."""
    return runtime_dir() / f"{re.sub('[^A-Za-z0-9-]', '_', gpu_uuid)}.json"


@contextmanager
def exclusive(gpu_uuid: str) -> Iterator[None]:
    """Keep other processes and threads from reading or writing the lease of a GPU meanwhile.

    Raises:
        DeviceError: If the folder cannot be written to.
    """
    with _open(gpu_uuid, ".lock") as descriptor:
        _lock(descriptor, "LOCK_EX")
        try:
            yield
        finally:
            _lock(descriptor, "LOCK_UN")  # closing is not enough while a forked child has a copy


@contextmanager
def watched(gpu_uuid: str) -> Iterator[int]:
    """A descriptor for a watchdog to inherit: as long as it lives, the GPU counts as watched in other containers."""
    with _open(gpu_uuid, ".watched") as descriptor:
        _lock(descriptor, "LOCK_SH")
        yield descriptor


def _is_watched(gpu_uuid: str) -> bool:
    with _open(gpu_uuid, ".watched") as descriptor:
        try:
            _lock(descriptor, "LOCK_EX", "LOCK_NB")
        except BlockingIOError:
            return True
        return False


@contextmanager
def _open(gpu_uuid: str, suffix: str) -> Iterator[int]:
    path = lease_path(gpu_uuid).with_suffix(suffix)
    with _explained(str(path)):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)  # another user's may not be opened to create it
        except FileNotFoundError:
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, _READABLE)
            os.fchmod(descriptor, _READABLE)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *flags: str) -> None:
    import fcntl  # does not exist on Windows, where nothing else of this project's device layer needs it

    fcntl.flock(descriptor, sum(getattr(fcntl, flag) for flag in flags))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn errors of the file system into the project's, saying what to do."""
    try:
        yield
    except OSError as error:
        raise DeviceError(
            f"Changing clocks needs a folder that remembers the change; {what}: {error}. "
            f"Set {DIRECTORY_VARIABLE} to a folder on this machine that you may write to."
        ) from error


def read_lease(gpu_uuid: str) -> Lease | None:
    """Read the lease of a GPU; None if there is none.

    Raises:
        DeviceError: If the file is damaged or of another version; the message says what to do.
    """
    return _read(lease_path(gpu_uuid))


def read_leases() -> list[Lease]:
    """Read all leases of `runtime_dir()`; damaged ones are logged and left out."""
    leases = []
    for path in sorted(runtime_dir().glob("*.json")):
        try:
            lease = _read(path)
        except DeviceError as error:
            logger.error("%s", error)
        else:
            leases += [lease] if lease is not None else []
    return leases


def write_lease(lease: Lease) -> None:
    """Write a lease, whole or not at all.

    Raises:
        DeviceError: If it cannot be written.
    """
    path = lease_path(lease.gpu_uuid)
    half_written = path.with_suffix(".tmp")  # always this name, so that killed processes do not fill the folder
    with _explained(f"{path} cannot be written"):
        half_written.unlink(missing_ok=True)
        # never what another user has laid there: a file of theirs, or a link to one of ours
        descriptor = os.open(half_written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _READABLE)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, _READABLE)
            json.dump({"version": VERSION} | asdict(lease), file, indent=1)
            file.flush()
            os.fsync(descriptor)  # renamed before it is on the disk, it would be empty after a power cut
        half_written.replace(path)


def delete_lease(gpu_uuid: str) -> None:
    """Delete the lease of a GPU, if there is one.

    Raises:
        DeviceError: If it cannot be deleted.
    """
    path = lease_path(gpu_uuid)
    with _explained(f"{path} cannot be deleted"):
        path.unlink(missing_ok=True)
        path.with_suffix(".tmp").unlink(missing_ok=True)


def _read(path: Path) -> Lease | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = content.pop("version")
        if version != VERSION:
            raise ValueError(f"its version is {version}, this program reads {VERSION}")
        holder = ProcessId(**content.pop("holder"))
        return Lease(**content | {"holder": holder, "changed": tuple(content["changed"])})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeviceError(
            f"A lease says who changed a GPU's clocks; {path} cannot be read: {error}. If no job uses that GPU, run "
            "nvidia-smi --reset-gpu-clocks for it and delete the file."
        ) from error
