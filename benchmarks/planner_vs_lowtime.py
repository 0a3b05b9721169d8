"""Our planner against lowtime 0.3.0, the solver behind Zeus and Perseus, on the same profile in one run.

    pip install lowtime==0.3.0
    python benchmarks/planner_vs_lowtime.py PROFILE.csv [num_microbatches=12] [p2p_blocking_power_w=85]
        [lowtime_limit_s=0]

Prints one JSON line: CPU seconds of both, their ratio, and how much less energy our plans need at the times of
lowtime's. lowtime emits a plan per millisecond of iteration time, and all of them lie on the way to the fastest, so
its time is that of the whole run: 52 minutes at 8 x 96. `lowtime_limit_s` stops it after so many CPU seconds. What it
has used by then, without an end, is less than it needs, so the ratio printed is one that is at least reached; nothing
is estimated. What lowtime needs to set up its graph is not counted. Ours is the median of five runs, from a profile in
memory to plans with bounds; nothing is warmed up but imports: another pipeline is planned before.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import networkx as nx
from lowtime.cost_model import ExponentialModel
from lowtime.graph_utils import add_sink_node, add_source_node
from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec
from lowtime.solver import PhillipsDessouky

from lightning_pfo.core.pipeline_schedule import PipelineSchedule, make_schedule
from lightning_pfo.planner import Frontier, Profile, plan_frontier, read_profile, simulate
from lightning_pfo.planner.instruction_dag import schedule_dag

UNIT_TIME_S = 0.001
REPEATS = 5


def operation_dag(profile: Profile, num_microbatches: int, power_w: float) -> nx.DiGraph:
    """The pipeline as lowtime wants it: an `Operation` per node, one source, one sink."""
    schedule = make_schedule("1f1b", profile.num_stages, num_microbatches)
    specs = {}
    for key, m in profile.instructions.items():
        options = [
            ExecutionOption(real_time=t, unit_time=UNIT_TIME_S, cost=e - power_w * t, knob=mhz)
            for mhz, t, e in zip(m.clocks_mhz, m.times_s, m.energies_j, strict=True)
        ]
        candidates = CandidateExecutionOptions(options=options)
        specs[key] = OperationSpec(options=candidates, cost_model=ExponentialModel(candidates))
    graph = nx.DiGraph()
    for number, inst in enumerate(schedule.instructions):
        graph.add_node(number, op=Operation(specs[inst.stage, inst.type]))
    graph.add_edges_from(schedule_dag(schedule).edges.tolist())
    add_source_node(graph, "source")
    add_sink_node(graph, "sink")
    graph.graph.update(source_node="source", sink_node="sink")
    return graph


def run_lowtime(graph: nx.DiGraph, num_nodes: int, limit_s: float) -> tuple[list[list[int]], float, bool]:
    """The clock of every instruction after each step, slow to fast; CPU seconds; whether it came to its end."""
    knobs, begin = [], time.process_time()
    for _ in PhillipsDessouky(graph).run():
        knobs.append([graph.nodes[number]["op"].assigned_knob for number in range(num_nodes)])
        used_s = time.process_time() - begin
        if limit_s and used_s > limit_s:
            return knobs, used_s, False
    return knobs, time.process_time() - begin, True


def run_ours(profile: Profile, num_microbatches: int, power_w: float) -> tuple[Frontier, float]:
    """A frontier of 50 plans and the median of the CPU seconds it took."""
    plan = partial(plan_frontier, profile, p2p_blocking_power_w=power_w)
    plan(num_microbatches=profile.num_stages, num_plans=2)
    used_s = []
    for _ in range(REPEATS):
        schedule_dag.cache_clear()
        begin = time.process_time()
        frontier = plan(num_microbatches=num_microbatches)
        used_s.append(time.process_time() - begin)
    return frontier, median(used_s)


def less_energy_percent(
    profile: Profile, knobs: Sequence[Sequence[int]], schedule: PipelineSchedule, power_w: float
) -> list[float]:
    """By how many per cent less energy our plans need, at the times of about 50 plans of lowtime's; ascending."""
    per_rank = len(schedule.orders[0])
    theirs = []
    for knob in [*knobs[:: max(len(knobs) // 50, 1)], knobs[-1]]:
        rows = [knob[first : first + per_rank] for first in range(0, len(knob), per_rank)]
        timeline = simulate(profile, schedule, rows, [power_w] * profile.num_stages)
        theirs.append((timeline.iteration_time_s, timeline.iteration_energy_j))
    ours = plan_frontier(
        profile, schedule=schedule, p2p_blocking_power_w=power_w, deadlines_s=[time_s for time_s, _ in theirs]
    )
    return sorted(
        100 * (1 - min(p.iteration_energy_j for p in ours.plans if p.iteration_time_s <= t * (1 + 1e-9)) / e)
        for t, e in theirs
    )


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
    graph = operation_dag(profile, num_microbatches, power_w)
    knobs, theirs_s, ended = run_lowtime(graph, len(schedule.instructions), float(settings.get("lowtime_limit_s", 0)))
    less = less_energy_percent(profile, knobs, schedule, power_w)
    result = {
        "pipeline": f"{profile.num_stages} x {num_microbatches}",
        "ours_cpu_s": round(ours_s, 4),
        "our_plans": len(frontier.plans),
        "median_gap_percent": round(median(gaps), 3),
        "largest_gap_percent": round(max(gaps), 3),
        "lowtime_cpu_s" if ended else "lowtime_cpu_s_without_an_end": round(theirs_s, 1),
        "lowtime_plans": len(knobs),
        "ratio" if ended else "ratio_at_least": math.floor(theirs_s / ours_s),
        "less_energy_than_lowtime_percent": {
            "least": round(less[0], 3),
            "median": round(median(less), 3),
            "most": round(less[-1], 3),
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
