"""The Pareto frontier of iteration time and iteration energy of a pipeline schedule.

Total energy = sum of effective energies + P2P blocking power x iteration time, summed over ranks. Effective energies
depend on the clocks only, so for a given iteration time T the best plan is a time-cost tradeoff over the instruction
DAG (see `tradeoff`), from the fastest plan to the one of least total energy.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.progress import Progress
from lightning_pfo.core.schedules.schedule import (
    SCHEDULES,
    PipelineSchedule,
    check_schedule_name,
    load_schedule,
    make_schedule,
)
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.limits.fewest_changes import equal_clocks, share_clocks
from lightning_pfo.planner.limits.switching import limit_switching
from lightning_pfo.planner.limits.wait_clocks import choose_wait_clocks
from lightning_pfo.planner.network.options import OptionSet, make_option_set
from lightning_pfo.planner.network.periodic_path import PeriodicPath
from lightning_pfo.planner.pipeline.steady_state import steady_middles
from lightning_pfo.planner.pipeline.timeline import Simulator
from lightning_pfo.planner.profile.blocking_power import BlockingPowerOption, resolve_blocking
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.profile_csv import read_profile
from lightning_pfo.planner.search.long_solver import LONG_MARGIN, LONG_PIECES, LONG_PIPELINE, trace_long_tradeoff
from lightning_pfo.planner.search.solver import TradeoffPoint, trace_tradeoff

_MERGED_PIPELINE, _MERGED_MARGIN = 500, 8
"""From so many instructions on, steady states are merged in the relaxation, without so many microbatches at either end:
the bound is looser by less than 0.01 %, and the relaxation 10 times as fast."""


def plan_frontier(
    profile: Profile | str | os.PathLike[str],
    *,
    num_microbatches: int | None = None,
    schedule: str | PipelineSchedule = "1f1b",
    stages_per_rank: int | None = None,
    p2p_blocking_power_w: BlockingPowerOption = None,
    num_plans: int = 50,
    deadlines_s: Sequence[float] = (),
    switch_latency_s: float = 0.0,
    least_dwell_s: float = 0.0,
    change_cost_j: float = 0.0,
    on_progress: Progress | None = None,
) -> Frontier:
    """Find the cheapest clocks for every instruction, for iteration times from the fastest to the least energy.

    The top clocks' iteration time is always among those planned for, so that "no slowdown" is on the frontier.

    Args:
        profile: Measurements, or the path of their CSV file.
        num_microbatches: Microbatches per iteration; not needed where `schedule` is a `PipelineSchedule`.
        schedule: Name of a schedule, `file:PATH` of an order of your own, or the order itself.
        stages_per_rank: Stages that share a GPU, for schedules that leave it open; None takes what is usual.
        p2p_blocking_power_w: Power of a GPU in watts while it waits for a neighbour: one number, one for each clock in
            MHz, a list with one of these per stage, or the path of a file that `lightning-pfo p2p-power` wrote; None
            takes the profile's own measurements. Where it depends on the clock, long waits get a low clock.
        num_plans: Number of iteration times to plan for, at least 2; dominated plans are dropped.
        deadlines_s: Further iteration times to plan for. Beyond the least-energy plan's time, that plan is the best.
        switch_latency_s: Time from a request until a clock changes, to be reckoned with. With it or the next two, plans
            change clocks less often, and say how much energy that costs (see `switching`).
        least_dwell_s: Time for which a rank keeps every clock at least within an iteration.
        change_cost_j: What it is worth to save a change of clocks, in joules; not part of the energies of the plans.
        on_progress: Called with what is being done, how much of it is done, and how much there is.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range or the schedule cannot be executed.
        PlanError: If a deadline is shorter than the fastest plan's time.
    """
    if not isinstance(profile, Profile):
        profile = read_profile(profile)
    check_plan_numbers(num_plans, switch_latency_s, least_dwell_s, change_cost_j)
    schedule = _resolve_schedule(schedule, profile, num_microbatches, stages_per_rank)
    blocking = resolve_blocking(profile, schedule, p2p_blocking_power_w)
    simulator = Simulator(profile, schedule, blocking)
    baseline = _baseline(profile, schedule, simulator)
    # No wait draws less than the least power, so what is a lower bound under it is one in any case.
    options = _effective_options(profile, schedule, [power.least_w for power in blocking])
    trace, periodic = _method_for(schedule)
    points = trace(
        simulator.dag,
        options,
        periodic=periodic,
        rate=sum(power.least_w for power in blocking),
        num_points=num_plans,
        times=[baseline.iteration_time_s],
        deadlines=deadlines_s,
        on_progress=on_progress,
    )
    varies = any(power.varies for power in blocking)
    equal = {} if varies else equal_clocks(profile)  # else equal instructions may leave unequal waits
    plans = []
    for point in points:
        clocks = [opts.knobs[k] for opts, k in zip(options, point.choice, strict=True)]
        rows = share_clocks(schedule, equal, _by_rank(schedule, clocks))
        plans.append(FrequencyPlan(schedule, rows, point.time, point.cost, point.bound))
    if varies:
        plans = _without_dominated([_with_wait_clocks(plan, simulator) for plan in plans])
    if switch_latency_s or least_dwell_s or change_cost_j:
        plans = limit_switching(
            plans,
            profile,
            blocking,
            options,
            starts=[baseline],
            deadlines_s=[baseline.iteration_time_s, *deadlines_s],
            switch_latency_s=switch_latency_s,
            least_dwell_s=least_dwell_s,
            change_cost_j=change_cost_j,
            on_progress=on_progress,
        )
    return Frontier(schedule, profile, blocking, baseline, tuple(plans), switch_latency_s, least_dwell_s)


def check_plan_numbers(num_plans: int, switch_latency_s: float, least_dwell_s: float, change_cost_j: float) -> None:
    """Check the numbers that `plan_frontier` is given, before there is a profile.

    Raises:
        ConfigurationError: If one is out of range.
    """
    if num_plans < 2:
        raise ConfigurationError(f"num_plans must be at least 2 (fastest and least energy), got {num_plans}.")
    if not all(0 <= limit < math.inf for limit in (switch_latency_s, least_dwell_s, change_cost_j)):
        raise ConfigurationError(
            "switch_latency_s, least_dwell_s (seconds) and change_cost_j (joules) must be finite and at least 0; got "
            f"{switch_latency_s}, {least_dwell_s} and {change_cost_j}. Changing a clock takes some milliseconds, e.g. "
            "switch_latency_s=0.01."
        )


def _method_for(schedule: PipelineSchedule) -> tuple[Callable[..., list[TradeoffPoint]], Sequence[PeriodicPath]]:
    """How the tradeoff is traced, and which steady states are merged on the way."""
    size = len(schedule.instructions)
    periodic = steady_middles(schedule, margin=LONG_MARGIN, pieces=LONG_PIECES) if size >= LONG_PIPELINE else []
    if periodic:
        return trace_long_tradeoff, periodic
    return trace_tradeoff, steady_middles(schedule, margin=_MERGED_MARGIN) if size >= _MERGED_PIPELINE else []


def _with_wait_clocks(plan: FrequencyPlan, simulator: Simulator) -> FrequencyPlan:
    """The plan with clocks for its long waits, and what its waits really cost."""
    timeline = simulator.run(plan.clocks_mhz)
    wait_clocks = choose_wait_clocks(timeline, simulator.blocking)
    timeline = simulator.run(plan.clocks_mhz, wait_clocks)
    return replace(plan, iteration_energy_j=timeline.iteration_energy_j, wait_clocks=wait_clocks)


def _without_dominated(plans: Sequence[FrequencyPlan]) -> list[FrequencyPlan]:
    """Those cheaper than all that are faster; fast to slow, as given."""
    kept: list[FrequencyPlan] = []
    for plan in plans:
        if not kept or plan.iteration_energy_j < kept[-1].iteration_energy_j:
            kept.append(plan)
    return kept


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


def _baseline(profile: Profile, schedule: PipelineSchedule, simulator: Simulator) -> FrequencyPlan:
    """Every instruction at its stage's top clock."""
    top = [profile.top_clock_mhz(stage) for stage in range(schedule.num_stages)]
    clocks = tuple(tuple(top[inst.stage] for inst in order) for order in schedule.orders)
    timeline = simulator.run(clocks)
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
    remaining = iter(clocks)
    return tuple(tuple(islice(remaining, len(order))) for order in schedule.orders)
