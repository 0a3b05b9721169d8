"""Restore GPU clocks that a crashed job has left locked.

Reads the leases that jobs leave on this machine and undoes those of dead processes; those of living ones only with
force=true. GPUs that lightning-pfo has not changed are not touched. Example:

  lightning-pfo restore-clocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.claim import undo_stale
from lightning_pfo.device.safety.lease import Lease, read_leases, runtime_dir


@dataclass
class Settings:
    """What `lightning-pfo restore-clocks` can be told."""

    gpu: str = field(default="", metadata={"help": "only this GPU: the beginning of its UUID; empty: all"})
    force: bool = field(
        default=False, metadata={"help": "also where the process that locked them still lives, e.g. because it hangs"}
    )


def run(settings: Settings) -> None:
    """Undo leases, say what was done.

    Raises:
        DeviceError: After all GPUs were tried, if one refused or is held by a living process.
    """
    console = Console(highlight=False, soft_wrap=True)
    leases = [lease for lease in read_leases() if lease.gpu_uuid.startswith(settings.gpu)]
    if not leases:
        console.print(f"Nothing to restore: no lease{_of(settings.gpu)} in {runtime_dir()}.")
    refusals: list[str] = []
    for lease in leases:
        try:
            console.print(_restore(lease, settings.force))
        except DeviceError as error:
            refusals.append(str(error))
    if refusals:
        raise DeviceError(" ".join(refusals))


def _restore(lease: Lease, force: bool) -> str:
    which = f"{lease.gpu_name} ({lease.gpu_uuid})"
    undone = undo_stale(lease.gpu_uuid, lease.holder, even_alive=force)
    if undone is not None:
        state = "its clocks are restored" if undone.changed else "its clocks had not been changed"
        return f"{which}: {state}; process {lease.holder.pid} had claimed them."
    if lease.is_held():
        raise DeviceError(
            f"{which} is in use: process {lease.holder.pid} sets its clocks and restores them when it ends. "
            "End that process, or use force=true."
        )
    return f"{which}: its clocks were restored meanwhile."


def _of(gpu: str) -> str:
    return f" of a GPU {gpu}..." if gpu else ""
