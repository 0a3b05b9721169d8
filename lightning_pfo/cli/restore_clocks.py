"""Restore GPU clocks that a crashed job has left locked.

Reads the leases that jobs leave on this machine and undoes those of dead processes; those of living ones only with
force=true. GPUs that lightning-pfo has not changed are not touched. all=true looks into the folders of all users that
this one may read; for administrators, before and after jobs, or every minute (see recipes). Example:

  lightning-pfo restore-clocks
  sudo lightning-pfo restore-clocks all=true
  lightning-pfo restore-clocks uuid=GPU-5d3c force=true
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from lightning_pfo.cli.console import plain_console
from lightning_pfo.core.errors import ConfigurationError, DeviceError
from lightning_pfo.device.config import load_gpu_config
from lightning_pfo.device.safety.claim import undo_stale
from lightning_pfo.device.safety.folder import all_dirs, own_dirs
from lightning_pfo.device.safety.lease import Lease, read_leases


@dataclass
class Settings:
    """What `lightning-pfo restore-clocks` can be told."""

    gpu: str = field(default="auto", metadata={"help": "auto for all, or nvml, zeus, ...: a file of conf/gpu"})
    uuid: str = field(default="", metadata={"help": "only GPUs whose UUID begins so"})
    force: bool = field(
        default=False, metadata={"help": "also where the process that locked them still lives, e.g. because it hangs"}
    )
    all: bool = field(default=False, metadata={"help": "leases of all users, not only those of this one"})
    under: str = field(
        default="/",
        metadata={"help": "with all=true: where the machine's files are, if mounted elsewhere", "is_path": True},
    )


def run(settings: Settings) -> None:
    """Undo leases, say what was done.

    Raises:
        ConfigurationError: If there is no such `gpu`.
        DeviceError: After all GPUs were tried, if one refused or is held by a living process.
    """
    console = plain_console()
    if settings.gpu.startswith("GPU-"):
        raise ConfigurationError(
            f"gpu is a file of conf/gpu, as everywhere; got {settings.gpu!r}. For one GPU use uuid={settings.gpu}."
        )
    kind = load_gpu_config(settings.gpu).kind
    folders = all_dirs(Path(settings.under)) if settings.all else own_dirs()
    leases = [
        (lease, folder)
        for folder in folders
        for lease in read_leases(folder)
        if kind in ("auto", lease.backend) and lease.gpu_uuid.startswith(settings.uuid)
    ]
    if not leases:
        places = " or ".join(map(str, folders))
        console.print(f"Nothing to restore: no lease{_of(kind, settings.uuid)} in {places}.")
    refusals: list[str] = []
    for lease, folder in leases:
        try:
            console.print(_restore(lease, folder, settings))
        except DeviceError as error:
            refusals.append(str(error))
    if refusals:
        raise DeviceError(" ".join(refusals))


def _restore(lease: Lease, folder: Path, settings: Settings) -> str:
    which = f"{lease.gpu_name} ({lease.gpu_uuid})"
    if lease.holder.is_elsewhere:
        return f"{which}: left alone, as it is in {lease.holder.host}. Run the command there."
    undone = undo_stale(lease.gpu_uuid, lease.holder, even_alive=settings.force, insists=settings.force, folder=folder)
    if undone is not None:
        state = "its clocks are restored" if undone.changed else "its clocks had not been changed"
        return f"{which}: {state}; process {lease.holder.pid} had claimed them."
    if lease.is_held(folder):
        if settings.all:
            return f"{which}: left alone, as process {lease.holder.pid} lives and sets its clocks."
        raise DeviceError(
            f"{which} is in use: process {lease.holder.pid} sets its clocks and restores them when it ends. "
            "End that process, or use force=true."
        )
    return f"{which}: its clocks were restored meanwhile."


def _of(kind: str, uuid: str) -> str:
    which = [f"set through {kind}"] if kind != "auto" else []
    which += [f"of a GPU {uuid}..."] if uuid else []
    return "".join(f" {words}" for words in which)
