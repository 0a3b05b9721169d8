"""Our planner against lowtime 0.3.0, the solver behind Zeus and Perseus, on the same profile in one run.

    pip install lowtime==0.3.0
    python benchmarks/planner_vs_lowtime.py PROFILE.csv [num_microbatches=12] [p2p_blocking_power_w=85]
        [lowtime_limit_s=0]

Prints one JSON line: CPU seconds of both, their ratio, how much less energy our plans need at the times of lowtime's,
and why. The reasons are looked at where both have plans, that is up to the time of our plan of least energy; beyond it
lowtime goes on with plans that are slower and dearer. lowtime emits a plan per millisecond of iteration time, and all
of them lie on the way to the fastest, so its time is that of the whole run: 52 minutes at 8 x 96. `lowtime_limit_s`
stops it after so many CPU seconds. What it has used by then, without an end, is less than it needs, so the ratio
printed is one that is at least reached; nothing is estimated. What lowtime needs to set up its graph is not counted.
Ours is the median of five runs, from a profile in memory to plans with bounds; nothing is warmed up but imports:
another pipeline is planned before.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import networkx as nx
import numpy as np
from lowtime.cost_model import ExponentialModel
from lowtime.graph_utils import add_sink_node, add_source_node
from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec
from lowtime.solver import PhillipsDessouky

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner import Frontier, Profile, plan_frontier, read_profile, simulate
from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.network.options import make_option_set
from lightning_pfo.planner.pipeline.problem import schedule_network
from lightning_pfo.planner.pipeline.timeline import Timeline

UNIT_TIME_S = 0.001
REPEATS = 5


@dataclass(frozen=True)
class Step:
    """A plan of lowtime's.

    Attributes:
        clocks_mhz: Clock of every instruction.
        time_s: What lowtime takes the iteration time for, in whole units.
    """

    clocks_mhz: list[int]
    time_s: float


def operation_specs(profile: Profile, power_w: float) -> dict[tuple[int, InstructionType], OperationSpec]:
    """The options of each kind of instruction, and the curve that lowtime fits to them."""
    specs = {}
    for key, m in profile.instructions.items():
        options = [
            ExecutionOption(real_time=t, unit_time=UNIT_TIME_S, cost=e - power_w * t, knob=mhz)
            for mhz, t, e in zip(m.clocks_mhz, m.times_s, m.energies_j, strict=True)
        ]
        candidates = CandidateExecutionOptions(options=options)
        specs[key] = OperationSpec(options=candidates, cost_model=ExponentialModel(candidates))
    return specs


def operation_dag(schedule: PipelineSchedule, specs: Mapping[tuple[int, InstructionType], OperationSpec]) -> nx.DiGraph:
    """The pipeline as lowtime wants it: an `Operation` per node, one source, one sink."""
    graph = nx.DiGraph()
    for number, inst in enumerate(schedule.instructions):
        graph.add_node(number, op=Operation(specs[inst.stage, inst.type]))
    graph.add_edges_from(schedule_network(schedule).edges.tolist())
    add_source_node(graph, "source")
    add_sink_node(graph, "sink")
    graph.graph.update(source_node="source", sink_node="sink")
    return graph


def run_lowtime(graph: nx.DiGraph, num_nodes: int, limit_s: float) -> tuple[list[Step], float, bool]:
    """The plans, slow to fast; CPU seconds; whether it came to its end."""
    steps, begin = [], time.process_time()
    for result in PhillipsDessouky(graph).run():
        clocks = [graph.nodes[number]["op"].assigned_knob for number in range(num_nodes)]
        steps.append(Step(clocks, result.real_time))
        used_s = time.process_time() - begin
        if limit_s and used_s > limit_s:
            return steps, used_s, False
    return steps, time.process_time() - begin, True


def run_ours(profile: Profile, num_microbatches: int, power_w: float) -> tuple[Frontier, float]:
    """A frontier of 50 plans and the median of the CPU seconds it took."""
    plan = partial(plan_frontier, profile, p2p_blocking_power_w=power_w)
    plan(num_microbatches=profile.num_stages, num_plans=2)
    used_s = []
    for _ in range(REPEATS):
        schedule_network.cache_clear()
        begin = time.process_time()
        frontier = plan(num_microbatches=num_microbatches)
        used_s.append(time.process_time() - begin)
    return frontier, median(used_s)


def play(profile: Profile, schedule: PipelineSchedule, clocks_mhz: Sequence[int], power_w: float) -> Timeline:
    """One iteration as the profile says."""
    per_rank = len(schedule.orders[0])
    rows = [clocks_mhz[first : first + per_rank] for first in range(0, len(clocks_mhz), per_rank)]
    return simulate(profile, schedule, rows, [power_w] * schedule.num_ranks)


def energies_within(plans: Sequence[tuple[float, float]], theirs: Sequence[Timeline]) -> list[float]:
    """The least energy (J) of the plans (time in s, energy in J) that are as fast as each of lowtime's."""
    limits_s = [timeline.iteration_time_s * (1 + 1e-9) for timeline in theirs]
    return [min(energy_j for time_s, energy_j in plans if time_s <= limit_s) for limit_s in limits_s]


def plans_on_fitted_curves(
    profile: Profile,
    specs: Mapping[tuple[int, InstructionType], OperationSpec],
    theirs: Sequence[Timeline],
    power_w: float,
) -> list[tuple[float, float]]:
    """What our own planner finds if it believes lowtime's curves; time (s) and energy (J) as the profile says."""
    fitted = {
        key: replace(
            m,
            energies_j=tuple(float(specs[key].cost_model(t / UNIT_TIME_S)) + power_w * t for t in m.times_s),
        )
        for key, m in profile.instructions.items()
    }
    schedule = theirs[0].schedule
    frontier = plan_frontier(
        replace(profile, instructions=fitted),
        schedule=schedule,
        p2p_blocking_power_w=power_w,
        deadlines_s=[timeline.iteration_time_s for timeline in theirs],
    )
    played = [play(profile, schedule, sum(plan.clocks_mhz, ()), power_w) for plan in frontier.plans]
    return [(timeline.iteration_time_s, timeline.iteration_energy_j) for timeline in played]


def left_over_percent(profile: Profile, theirs: Sequence[Timeline], power_w: float) -> list[float]:
    """How many per cent of energy slower clocks would save that leave the iteration times of lowtime's plans."""
    kinds = {
        key: make_option_set(
            m.times_s, [e - power_w * t for t, e in zip(m.times_s, m.energies_j, strict=True)], m.clocks_mhz
        )
        for key, m in profile.instructions.items()
    }
    options = [kinds[inst.stage, inst.type] for inst in theirs[0].schedule.instructions]
    table = OptionTable(theirs[0].dag, options)
    percent = []
    for timeline in theirs:
        # Dominated clocks have no place in the table: the slowest option that is no slower is at least as cheap.
        choice = [
            int(np.searchsorted(opts.times, duration * (1 + 1e-12), side="right")) - 1
            for opts, duration in zip(options, timeline.durations_s, strict=True)
        ]
        slowed, _ = table.spend_slack(np.array(choice)[:, None], np.array([timeline.iteration_time_s]))
        waiting_j = power_w * timeline.schedule.num_ranks * timeline.iteration_time_s
        percent.append(100 * (1 - (float(table.total_costs(slowed)[0]) + waiting_j) / timeline.iteration_energy_j))
    return percent


def spread(values: Sequence[float]) -> dict[str, float]:
    """Least, median and most."""
    return {"least": round(min(values), 3), "median": round(median(values), 3), "most": round(max(values), 3)}


def reasons(
    profile: Profile,
    specs: Mapping[tuple[int, InstructionType], OperationSpec],
    steps: Sequence[Step],
    theirs: Sequence[Timeline],
    ours_j: Sequence[float],
    power_w: float,
) -> dict[str, dict[str, float]]:
    """What makes the difference between lowtime's plans and ours that are as fast."""
    believing = energies_within(plans_on_fitted_curves(profile, specs, theirs, power_w), theirs)
    return {
        "less_energy": spread(
            [100 * (1 - j / real.iteration_energy_j) for j, real in zip(ours_j, theirs, strict=True)]
        ),
        "lost_by_fitted_curves": spread([100 * (j / best_j - 1) for j, best_j in zip(believing, ours_j, strict=True)]),
        "lost_by_slack_left_over": spread(left_over_percent(profile, theirs, power_w)),
        "slower_than_lowtime_says": spread(
            [100 * (real.iteration_time_s / step.time_s - 1) for real, step in zip(theirs, steps, strict=True)]
        ),
    }


def main() -> None:
    """Run both and print what came out."""
    logging.disable(logging.INFO)
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    num_microbatches = int(settings.get("num_microbatches", 12))
    power_w = float(settings.get("p2p_blocking_power_w", 85))
    profile = read_profile(Path(sys.argv[1]))
    schedule = make_schedule("1f1b", profile.num_stages, num_microbatches)

    frontier, ours_s = run_ours(profile, num_microbatches, power_w)
    gaps = [100 * plan.gap for plan in frontier.plans]
    specs = operation_specs(profile, power_w)
    steps, theirs_s, ended = run_lowtime(
        operation_dag(schedule, specs), len(schedule.instructions), float(settings.get("lowtime_limit_s", 0))
    )
    some = [*steps[:: max(len(steps) // 50, 1)], steps[-1]]
    theirs = [play(profile, schedule, step.clocks_mhz, power_w) for step in some]
    deadlines_s = [timeline.iteration_time_s for timeline in theirs]
    best = plan_frontier(profile, schedule=schedule, p2p_blocking_power_w=power_w, deadlines_s=deadlines_s)
    ours = energies_within([(plan.iteration_time_s, plan.iteration_energy_j) for plan in best.plans], theirs)
    energies_j = [timeline.iteration_energy_j for timeline in theirs]
    both = [i for i, deadline_s in enumerate(deadlines_s) if deadline_s <= best.least_energy.iteration_time_s]
    result: dict[str, Any] = {
        "pipeline": f"{profile.num_stages} x {num_microbatches}",
        "ours_cpu_s": round(ours_s, 4),
        "our_plans": len(frontier.plans),
        "median_gap_percent": round(median(gaps), 3),
        "largest_gap_percent": round(max(gaps), 3),
        "lowtime_cpu_s" if ended else "lowtime_cpu_s_without_an_end": round(theirs_s, 1),
        "lowtime_plans": len(steps),
        "ratio" if ended else "ratio_at_least": math.floor(theirs_s / ours_s),
        "less_energy_than_lowtime_percent": spread(
            [100 * (1 - j / theirs_j) for j, theirs_j in zip(ours, energies_j, strict=True)]
        ),
    }
    if both:
        result["where_both_have_plans_percent"] = reasons(
            profile, specs, [some[i] for i in both], [theirs[i] for i in both], [ours[i] for i in both], power_w
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
