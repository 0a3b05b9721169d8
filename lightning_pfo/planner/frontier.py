"""The Pareto frontier of iteration time and iteration energy of a pipeline schedule.

Total energy = sum of effective energies + P2P blocking power x iteration time, summed over ranks. Effective energies
depend on the clocks only, so for a given iteration time T the best plan is a time-cost tradeoff over the instruction
DAG (see `tradeoff`), from the fastest plan to the one of least total energy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.pipeline_schedule import (
    SCHEDULES,
    PipelineSchedule,
    check_schedule_name,
    load_schedule,
    make_schedule,
)
from lightning_pfo.planner.hull import OptionSet, make_option_set
from lightning_pfo.planner.instruction_dag import schedule_dag
from lightning_pfo.planner.profile import Profile, read_profile
from lightning_pfo.planner.timeline import Timeline, simulate, simulate_plan
from lightning_pfo.planner.tradeoff import Progress, trace_tradeoff


@dataclass(frozen=True)
class Frontier:
    """Plans between the fastest and the one of least energy, none dominated.

    Attributes:
        schedule: The order that all plans belong to.
        profile: The measurements they were made from.
        p2p_blocking_powers_w: Power of each rank's GPUs while they wait for a neighbour.
        baseline: Every stage at its top clock.
        plans: From the fastest to the one of least energy.
    """

    schedule: PipelineSchedule
    profile: Profile
    p2p_blocking_powers_w: tuple[float, ...]
    baseline: FrequencyPlan
    plans: tuple[FrequencyPlan, ...]

    @property
    def p2p_blocking_power_w(self) -> float:
        """Mean blocking power over the ranks in watts."""
        return sum(self.p2p_blocking_powers_w) / len(self.p2p_blocking_powers_w)

    @property
    def fastest(self) -> FrequencyPlan:
        """The plan of least iteration time."""
        return self.plans[0]

    @property
    def least_energy(self) -> FrequencyPlan:
        """The plan of least iteration energy."""
        return self.plans[-1]

    def number_of(self, plan: FrequencyPlan) -> int:
        """The plan's number in files and in `select_plan`: 0 is the slowest, larger is faster (as Zeus counts)."""
        return len(self.plans) - 1 - self.plans.index(plan)

    def timeline(self, plan: FrequencyPlan) -> Timeline:
        """One iteration of `plan` as the profile predicts it."""
        return simulate_plan(self.profile, plan, self.p2p_blocking_powers_w)


def plan_frontier(
    profile: Profile | str | os.PathLike[str],
    *,
    num_microbatches: int | None = None,
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int | None = None,
    p2p_blocking_power_w: float | Sequence[float] | None = None,
    num_plans: int = 50,
    deadlines_s: Sequence[float] = (),
    on_progress: Progress | None = None,
) -> Frontier:
    """Find the cheapest clocks for every instruction, for iteration times from the fastest to the least energy.

    The top clocks' iteration time is always among those planned for, so that "no slowdown" is on the frontier.

    Args:
        profile: Measurements, or the path of their CSV file.
        num_microbatches: Microbatches per iteration; not needed where `schedule` is a `PipelineSchedule`.
        schedule: Name of a schedule, `file:PATH` of an order of your own, or the order itself.
        stages_per_rank: Stages that share a GPU, for schedules that leave it open; None takes what is usual.
        p2p_blocking_power_w: Power of a GPU in watts while it waits for a neighbour, one number or one per stage;
            None takes the profile's own measurements at the top clocks.
        num_plans: Number of iteration times to plan for, at least 2; dominated plans are dropped.
        deadlines_s: Further iteration times to plan for. Beyond the least-energy plan's time, that plan is the best.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range or the schedule cannot be executed.
        PlanError: If a deadline is shorter than the fastest plan's time.
    """
    if not isinstance(profile, Profile):
        profile = read_profile(profile)
    if num_plans < 2:
        raise ConfigurationError(f"num_plans must be at least 2 (fastest and least energy), got {num_plans}.")
    schedule = _resolve_schedule(schedule, profile, num_microbatches, stages_per_rank)
    powers = _resolve_blocking_powers(profile, schedule, p2p_blocking_power_w)
    baseline = _baseline(profile, schedule, powers)
    options = _effective_options(profile, schedule, powers)
    points = trace_tradeoff(
        schedule_dag(schedule),
        options,
        rate=sum(powers),
        num_points=num_plans,
        times=[baseline.iteration_time_s],
        deadlines=deadlines_s,
        on_progress=on_progress,
    )
    plans = []
    for point in points:
        clocks = _by_rank(schedule, [opts.knobs[k] for opts, k in zip(options, point.choice, strict=True)])
        plans.append(FrequencyPlan(schedule, clocks, point.time, point.cost, point.bound))
    return Frontier(schedule, profile, powers, baseline, tuple(plans))


def _resolve_schedule(
    schedule: str | PipelineSchedule, profile: Profile, num_microbatches: int | None, stages_per_rank: int | None
) -> PipelineSchedule:
    if isinstance(schedule, str):
        check_schedule_name(schedule)
        family = SCHEDULES.get(schedule.partition(":")[0])
        if family is not None:
            return _make_schedule(schedule, profile, num_microbatches, stages_per_rank or family.stages_per_rank)
        schedule = load_schedule(schedule.removeprefix("file:"))
    if num_microbatches not in (None, schedule.num_microbatches):
        raise ConfigurationError(
            f"num_microbatches={num_microbatches} contradicts the given schedule {schedule.name!r} of "
            f"{schedule.num_microbatches} microbatches. Leave it out or make them equal."
        )
    if schedule.num_stages != profile.num_stages:
        raise ConfigurationError(
            f"The profile must have the stages of the schedule: {schedule.name!r} has {schedule.num_stages} stages, "
            f"the profile {profile.num_stages}. Profile a pipeline of {schedule.num_stages} stages."
        )
    return schedule


def _make_schedule(name: str, profile: Profile, num_microbatches: int | None, stages_per_rank: int) -> PipelineSchedule:
    if num_microbatches is None:
        raise ConfigurationError(
            f"Planning for schedule {name!r} needs the number of microbatches per iteration: "
            "give num_microbatches, e.g. num_microbatches=12."
        )
    if profile.num_stages % stages_per_rank:
        raise ConfigurationError(
            f"Schedule {name!r} with {stages_per_rank} stages per rank needs a multiple of {stages_per_rank} stages; "
            f"the profile has {profile.num_stages}. Give stages_per_rank, or profile another number of stages."
        )
    return make_schedule(name, profile.num_stages // stages_per_rank, num_microbatches, stages_per_rank)


def _resolve_blocking_powers(
    profile: Profile, schedule: PipelineSchedule, given: float | Sequence[float] | None
) -> tuple[float, ...]:
    """Blocking power of each rank in watts (all its GPUs together)."""
    num_stages = schedule.num_stages
    by_stage: Sequence[float | None]
    if given is None:
        by_stage = [profile.p2p_blocking_power_w(stage) for stage in range(num_stages)]
    elif isinstance(given, (int, float)):
        by_stage = [given * profile.gpus_per_stage] * num_stages
    else:
        by_stage = [power * profile.gpus_per_stage for power in given]
    if len(by_stage) != num_stages:
        raise ConfigurationError(
            f"p2p_blocking_power_w is one number or one per stage; got {len(by_stage)} for {num_stages} stages."
        )
    known = [power for power in by_stage if power is not None]
    if len(known) < num_stages:
        raise ProfileError(
            "The profile does not say how much power a GPU takes while it waits for a neighbour (column "
            "p2p_blocking_power_w). Give it in watts, e.g. p2p_blocking_power_w=85; 84 W was measured on an A100 SXM, "
            "70 W on an A40."
        )
    if not all(np.isfinite(power) and power >= 0 for power in known):
        raise ConfigurationError(f"p2p_blocking_power_w must be a finite power in watts, at least 0; got {given}.")
    # The stages of one rank share its GPUs.
    stages_of_ranks = map(schedule.stages_of, range(schedule.num_ranks))
    return tuple(sum(known[stage] for stage in stages) / len(stages) for stages in stages_of_ranks)


def _baseline(profile: Profile, schedule: PipelineSchedule, powers: tuple[float, ...]) -> FrequencyPlan:
    """Every instruction at its stage's top clock."""
    for inst in schedule.instructions:
        profile.of(inst.stage, inst.type)  # a missing instruction is an error here, before any work
    top = [profile.top_clock_mhz(stage) for stage in range(schedule.num_stages)]
    clocks = tuple(tuple(top[inst.stage] for inst in order) for order in schedule.orders)
    timeline = simulate(profile, schedule, clocks, powers)
    return FrequencyPlan(schedule, clocks, timeline.iteration_time_s, timeline.iteration_energy_j)


def _effective_options(profile: Profile, schedule: PipelineSchedule, powers: Sequence[float]) -> list[OptionSet]:
    """Options of each instruction with effective energy (energy - blocking power x time) as their cost."""
    kinds: dict[tuple[int, int, str], OptionSet] = {}
    options = []
    for rank, (order, power) in enumerate(zip(schedule.orders, powers, strict=True)):
        for inst in order:
            key = (rank, inst.stage, inst.type.value)
            if key not in kinds:
                measured = profile.of(inst.stage, inst.type)
                costs = [e - power * t for t, e in zip(measured.times_s, measured.energies_j, strict=True)]
                kinds[key] = make_option_set(measured.times_s, costs, measured.clocks_mhz)
            options.append(kinds[key])
    return options


def _by_rank(schedule: PipelineSchedule, clocks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    rest = iter(clocks)
    return tuple(tuple(next(rest) for _ in order) for order in schedule.orders)
