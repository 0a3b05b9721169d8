"""What clients tell about a job, a rank and its iterations, and what a plan is on its way to them."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PlanRow = tuple[tuple[str, int], ...]
"""What one rank runs in an iteration: names of instructions and their clocks in MHz, in execution order."""

MOST_RANKS = 65_536
"""Ranks of a job at most."""


@dataclass(frozen=True)
class JobInfo:
    """A training job.

    Attributes:
        pp_degree: Stages of the pipeline, each with ranks of its own.
        dp_degree: Replicas of the pipeline.
        tp_degree: Ranks that share the layers of a stage.
        world_size: Their product.
        metadata: Words of the user, which become part of the job's name.
        request_id: What tells a repeated registration from another job; empty where the client sends none.
    """

    pp_degree: int
    dp_degree: int
    tp_degree: int
    world_size: int
    metadata: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class RankInfo:
    """One process of a job.

    Attributes:
        rank: Its number among all.
        dp_rank: Its replica.
        pp_rank: Its stage, or its place in the pipeline where places run several stages.
        tp_rank: Its part of the layers.
        clocks_mhz: What its GPU can be locked to, highest first.
        pipe_schedule: Everything the rank does in an iteration, where its client says so (the Perseus artifact's do).
    """

    rank: int
    dp_rank: int
    pp_rank: int
    tp_rank: int
    clocks_mhz: tuple[int, ...]
    pipe_schedule: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[int, int, int]:
        """Where in the job it is; no other rank is there."""
        return self.dp_rank, self.pp_rank, self.tp_rank


@dataclass(frozen=True)
class Report:
    """What a rank has measured under a plan.

    Attributes:
        rank: Who measured.
        iteration_times_s: Times of the iterations.
        iteration_energies_j: Energies of the rank's GPU meanwhile.
        times_s: By instruction, a list per iteration with the time of each microbatch.
        energies_j: Their energies, alike.
        energy_stderrs_j: Standard errors of their mean energies, by instruction, where the client knows them.
        version: The version of the plan; None where the client does not know versions.
    """

    rank: int
    iteration_times_s: tuple[float, ...]
    iteration_energies_j: tuple[float, ...]
    times_s: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    energies_j: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    energy_stderrs_j: Mapping[str, float] = field(default_factory=dict)
    version: int | None = None

    @property
    def digest(self) -> str:
        """What tells a repeated report from another one."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=12).hexdigest()

    def means(self) -> dict[str, Any]:
        """What is kept: mean time (s) and energy (J) of an iteration and of each instruction, and their errors."""
        return {
            "iteration": [_mean(self.iteration_times_s), _mean(self.iteration_energies_j)],
            "instructions": {
                name: [_mean(_flat(rows)), _mean(_flat(self.energies_j.get(name, ())))]
                for name, rows in self.times_s.items()
            },
            "stderrs": {
                name: [_stderr(_flat(rows)), self.energy_stderrs_j.get(name)] for name, rows in self.times_s.items()
            },
            "counts": {name: len(_flat(rows)) for name, rows in self.times_s.items()},
            "iterations": len(self.iteration_times_s),
        }


@dataclass(frozen=True)
class PlanRows:
    """A plan as the director made it, for all ranks of a job.

    Attributes:
        rows: One row per place in the pipeline, or per rank of the job if there are as many.
        label: How it was chosen, e.g. `no_slowdown`, or `1410 MHz` in a scan.
        purpose: `scan` where clocks are measured, `verify` in windows of a trial, `plan` to be trained under.
        iteration_time_s: Predicted time of an iteration, where known.
        iteration_energy_j: Predicted energy of a pipeline, where known.
        saving_percent: Predicted saving of energy compared with the top clocks, where known.
        trial: Which window it is, where it is verified: see `verifying.Trial`.
        verified: What its trial has found: saving and slowdown, with 95 % intervals; None where it was not tried.
    """

    rows: tuple[PlanRow, ...]
    label: str
    purpose: str = "plan"
    iteration_time_s: float | None = None
    iteration_energy_j: float | None = None
    saving_percent: float | None = None
    trial: Mapping[str, int] | None = None
    verified: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class VersionedPlan(PlanRows):
    """A plan as a job has it.

    Attributes:
        version: 1, 2, ...; each change of plan has the next one.
        from_step: The iteration from which on all ranks follow it, by their own count.
        is_by_rank: Whether rows are for ranks of the job rather than for places in the pipeline.
    """

    version: int = 1
    from_step: int = 0
    is_by_rank: bool = False

    def row_of(self, info: RankInfo) -> PlanRow:
        """What one rank runs."""
        return self.rows[info.rank if self.is_by_rank else info.pp_rank]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _stderr(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]
