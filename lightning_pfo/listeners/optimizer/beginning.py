"""How a run begins with a pipeline: which clocks may be measured, and what is known of it from an earlier run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.listeners.agreement import is_first
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.optimizer.memory import Keeper, Memory
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.planner.adaptive.choice import bracket

_FEWEST_CLOCKS = 3


@dataclass(frozen=True)
class Beginning:
    """What is known before anything is measured; the same on all ranks.

    Attributes:
        memory: What was measured before; empty where nothing was, or nothing that fits.
        notes: What there is to say of it.
    """

    memory: Memory
    notes: tuple[str, ...]


def measurable_clocks(source: InstructionSource, session: GpuSession, settings: OptimizerSettings) -> tuple[int, ...]:
    """Clocks that all GPUs have and that may be measured, the highest first; a collective call.

    Raises:
        DeviceError: On all ranks, if there are too few.
    """
    told = source.all_gather(frozenset(session.gpu.supported_clocks_mhz()), everywhere=True)
    lowest = settings.min_clock_mhz or session.config.scan_min_mhz or 0
    highest = session.config.scan_max_mhz or math.inf
    common = frozenset.intersection(*told)
    clocks = tuple(sorted((mhz for mhz in common if lowest <= mhz <= highest), reverse=True))
    if not clocks or len(bracket(clocks)) < _FEWEST_CLOCKS:
        raise DeviceError(
            f"A plan is made from {_FEWEST_CLOCKS} clocks or more; the GPUs have {counted(len(clocks), 'clock')} in "
            f"common that may be measured ({lowest} to {highest} MHz). Let min_clock_mhz be lower."
        )
    return clocks


def begin(
    source: InstructionSource,
    session: GpuSession,
    schedule: PipelineSchedule,
    keeper: Keeper,
    job: Mapping[str, str],
) -> Beginning:
    """Look for what an earlier run has measured of the same; a collective call.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        schedule: What is executed.
        keeper: Knows where to look.
        job: What else measurements depend on, by name.
    """
    told = source.all_gather(_fingerprint(source, session, schedule, job), everywhere=True)
    fingerprint = {name: " / ".join(sorted({one[name] for one in told})) for name in told[0]}
    found = keeper.recall(fingerprint) if is_first(source) else (None, None)
    kept, refusal = source.all_gather(found, everywhere=True)[0]
    notes = [refusal] if refusal else []
    if kept is not None and kept.rows:
        count = counted(len(kept.rows), "measurement")
        notes.append(f"{count} of an earlier run {'are complete' if kept.is_complete else 'are taken up'}.")
    return Beginning(kept or Memory(fingerprint), tuple(notes))


def _fingerprint(
    source: InstructionSource, session: GpuSession, schedule: PipelineSchedule, job: Mapping[str, str]
) -> dict[str, str]:
    """What this rank knows of what measurements are of."""
    return {
        "stages": str(schedule.num_stages),
        "schedule": schedule.name,
        "microbatches": str(schedule.num_microbatches),
        "microbatch": source.microbatch,
        "gpu": session.gpu.name,
        "driver": str(getattr(session.gpu, "driver_version", "")),
        "torch": str(torch.__version__),
        **job,
    }
