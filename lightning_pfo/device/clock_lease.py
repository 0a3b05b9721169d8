"""Leases: files that say which process has changed the clocks of which GPU, so that they can always be restored.

::

    acquire            note_change      (the driver is asked)      release
    watchdog, lease    lease rewritten  lock .. lock .. reset      lease deleted, watchdog ended
            '--- whenever the process dies in between, the watchdog or the next start undoes what the lease says

A lease is deleted only after the clocks were restored. Leases of one GPU are read and written under a file lock. They
lie in `runtime_dir()`, one per GPU: `GPU-....json`.
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
from lightning_pfo.device.processes import ProcessId

logger = logging.getLogger(__name__)

VERSION = 1
DIRECTORY_VARIABLE = "LIGHTNING_PFO_RUNTIME_DIR"
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


def runtime_dir() -> Path:
    """The folder of leases: the same for all jobs of a user on this machine, and private.

    LIGHTNING_PFO_RUNTIME_DIR, if set (let jobs of several users or containers share a folder by it); else for root
    /run/lightning-pfo; else a folder in XDG_RUNTIME_DIR or, named by the user's number, among the temporary files.

    Raises:
        DeviceError: If it cannot be made, or belongs to somebody else.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given:
        folder = Path(given)
    elif os.getuid() == 0 and os.access("/run", os.W_OK):
        folder = Path("/run/lightning-pfo")
    elif os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "lightning-pfo"
    else:
        folder = Path(tempfile.gettempdir()) / f"lightning-pfo-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_ours = bool(given) or folder.lstat().st_uid == os.getuid()
    except OSError as error:
        raise DeviceError(
            f"Changing clocks needs a folder that remembers the change; {folder} cannot be made: {error}. "
            f"Set {DIRECTORY_VARIABLE} to a folder on this machine that you may write to."
        ) from error
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
    """Keep other processes and threads from reading or writing the lease of a GPU meanwhile."""
    import fcntl  # does not exist on Windows, where nothing else of this project's device layer needs it

    descriptor = os.open(lease_path(gpu_uuid).with_suffix(".lock"), os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough while a forked child has a copy
        os.close(descriptor)


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
    try:
        half_written = path.with_suffix(".tmp")  # always this name, so that killed processes do not fill the folder
        half_written.write_text(json.dumps({"version": VERSION} | asdict(lease), indent=1), encoding="utf-8")
        half_written.replace(path)
    except OSError as error:
        raise DeviceError(f"A GPU's clocks are changed only after that is on disk; {path}: {error}.") from error


def delete_lease(gpu_uuid: str) -> None:
    """Delete the lease of a GPU, if there is one."""
    path = lease_path(gpu_uuid)
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DeviceError(
            f"A lease says who changed a GPU's clocks; {path} cannot be read: {error}. If no job uses that GPU, run "
            "nvidia-smi --reset-gpu-clocks for it and delete the file."
        ) from error
