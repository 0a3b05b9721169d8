"""What the first rank decides beside the training: measure more, or train under a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.files import PatientFiles, write_text_atomically
from lightning_pfo.core.flags import POWER_CAP
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.optimizer.choosing.objectives import Moment, Objective, Selection
from lightning_pfo.listeners.optimizer.memory import Memory
from lightning_pfo.listeners.profile_row import ProfileRow, profile_records
from lightning_pfo.planner.adaptive.choice import Kind, choose, is_worth_more
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.profile.profile_csv import profile_of_text, profile_text
from lightning_pfo.planner.profile.switch_latency import summarised
from lightning_pfo.planner.settings import PlanSettings


@dataclass(frozen=True)
class Decision:
    """What to do next.

    Attributes:
        frontier: The plans that are possible, from what is known.
        plan: The one to train under.
        next_mhz: Clocks to measure before, one for each rank in each; none: enough is known.
        gain_j: What measuring more may save in an iteration, at most.
    """

    frontier: Frontier
    plan: FrequencyPlan
    next_mhz: tuple[tuple[int, ...], ...]
    gain_j: float

    def __str__(self) -> str:
        base_j, plan_j = self.frontier.baseline.iteration_energy_j, self.plan.iteration_energy_j
        saving, gain = saving_percent(plan_j, base_j), saving_percent(plan_j - self.gain_j, plan_j)
        return (
            f"{self.plan.iteration_time_s:.4g} s and {plan_j:.5g} J predicted, {saving:.1f} % less than the "
            f"{base_j:.5g} J of the top clocks; more measuring could gain {gain:.2f} %"
        )


def decide(
    memory: Memory,
    schedule: PipelineSchedule,
    clocks_mhz: Sequence[int],
    profile_path: Path,
    files: PatientFiles,
    *,
    objective: Objective,
    moment: Moment,
    planning: PlanSettings,
    may_measure: bool,
    stages: Sequence[int] | None = None,
) -> Decision:
    """Fit, plan, and see whether measuring more is worth it.

    Args:
        memory: What was measured.
        schedule: What is executed.
        clocks_mhz: Clocks that all GPUs have, the highest first.
        profile_path: Where the profile is written.
        files: Writes it.
        objective: Which plan is wanted.
        moment: How far the training has come.
        planning: How to plan.
        may_measure: Whether more may be measured at all.
        stages: Measure these stages only, the others at the top clock; None: all.

    Raises:
        DeviceError: If a stage was measured at its top clock only.
        PfoError: If no plan can be made.
    """
    _check_several_clocks(memory.rows)
    text = profile_text(profile_path, profile_records(with_latency(with_waiting_power(memory.rows), memory)))
    files.write(profile_path, partial(write_text_atomically, profile_path, text))
    choice = choose(
        profile_of_text(str(profile_path), text),
        schedule,
        clocks_mhz,
        select=lambda frontier: objective.plan_of(frontier, moment),
        settings=_with_selection(planning, objective),
        held_mhz=held_clocks(memory.rows),
    )
    next_mhz = (
        choice.next_mhz
        if may_measure and is_worth_more(choice, moment.iterations_left, _iterations_each(memory))
        else ()
    )
    if stages is not None:
        next_mhz = tuple(only_ranks(schedule, stages, clocks, clocks_mhz[0]) for clocks in next_mhz)
    return Decision(choice.frontier, choice.plan, next_mhz, choice.gain_j)


def _with_selection(planning: PlanSettings, objective: Objective) -> PlanSettings:
    """The settings, of which a plan comes for the very time that is wanted, where that is said."""
    return replace(planning, select=objective.expression) if isinstance(objective, Selection) else planning


def _check_several_clocks(rows: Sequence[ProfileRow]) -> None:
    """See that GPUs ran at what they were asked for: what was measured at other clocks is not among the rows."""
    of_stages: dict[int, list[ProfileRow]] = {}
    for row in rows:
        of_stages.setdefault(row.stage, []).append(row)
    for stage, some in sorted(of_stages.items()):
        clocks = {row.frequency for row in some}
        if len(clocks) == 1:
            raise DeviceError(
                f"A plan is made from measurements at several clocks; of stage {stage} there are those at "
                f"{max(clocks)} MHz only: {some[0].gpu or 'its GPU'} did not run at the others that it was set to, or "
                "its counter showed no energy there. Find out with `lightning-pfo gpu probe=true` whether clocks can "
                "be set."
            )


def _iterations_each(memory: Memory) -> float:
    """Iterations that a clock has taken so far: many where energy counters tick."""
    clocks_of: dict[int, set[int]] = {}
    for row in memory.rows:
        clocks_of.setdefault(row.stage, set()).add(row.frequency)
    count = max(map(len, clocks_of.values())) - 1  # the top clock is measured before
    return max(1.0, memory.iterations / count) if count else 1.0


def only_ranks(
    schedule: PipelineSchedule, stages: Sequence[int], clocks_mhz: Sequence[int], top_mhz: int
) -> tuple[int, ...]:
    """The clocks for the ranks that have one of the stages, the top clock for the others."""
    ranks = {schedule.rank_of(stage) for stage in stages}
    return tuple(mhz if rank in ranks else top_mhz for rank, mhz in enumerate(clocks_mhz))


def missing_clocks(
    rows: Sequence[ProfileRow], schedule: PipelineSchedule, clocks_mhz: Sequence[int]
) -> list[tuple[int, ...]]:
    """Of some clocks, the highest first, those that are not measured: one for each rank in each.

    Args:
        rows: What was measured, the highest clock on all stages.
        schedule: What is executed.
        clocks_mhz: The clocks.
    """
    known = {(row.stage, row.frequency) for row in rows}
    missing = {mhz: [stage for stage in range(schedule.num_stages) if (stage, mhz) not in known] for mhz in clocks_mhz}
    return [
        only_ranks(schedule, stages, (mhz,) * schedule.num_ranks, clocks_mhz[0])
        for mhz, stages in missing.items()
        if stages
    ]


def held_clocks(rows: Sequence[ProfileRow]) -> dict[Kind, float]:
    """At which clock each kind of instruction ran at its top clock: that of a power cap where one held it."""
    tops: dict[tuple[int, str], ProfileRow] = {}
    for row in rows:
        key = row.stage, row.instruction
        if key not in tops or row.frequency > tops[key].frequency:
            tops[key] = row
    kinds = {kind.profile_name: kind for kind in InstructionType}
    return {
        (stage, kinds[name]): float(row.clock_seen_mhz if POWER_CAP in row.flags.split() else row.frequency)
        for (stage, name), row in tops.items()
        if not math.isnan(row.clock_seen_mhz)
    }


def with_waiting_power(rows: Sequence[ProfileRow]) -> list[ProfileRow]:
    """The rows with a power of waiting where nobody waited: on a parabola through what others drew, by clock."""
    known = [(row.frequency, row.p2p_blocking_power_w) for row in rows if not math.isnan(row.p2p_blocking_power_w)]
    if not known:
        return list(rows)
    clocks, powers = np.array(known).T
    top = clocks.max()
    terms = np.polynomial.Polynomial.fit(clocks / top, powers, min(2, len(set(clocks)) - 1), domain=[0, 1])
    least, most = float(powers.min()), float(powers.max())

    def fitted_w(clock_mhz: int) -> float:
        return float(min(max(terms(clock_mhz / top), least), most))

    return [
        replace(row, p2p_blocking_power_w=fitted_w(row.frequency)) if math.isnan(row.p2p_blocking_power_w) else row
        for row in rows
    ]


def with_latency(rows: Sequence[ProfileRow], memory: Memory) -> list[ProfileRow]:
    """The rows with what is known of how long clocks take to change."""
    latency = summarised({(before, after): some for before, after, some in memory.latencies_s})
    if latency is None:
        return list(rows)
    cells = latency.cells({row.frequency for row in rows})
    return [replace(row, switch_latency=cells[row.frequency]) for row in rows]
