"""Our planner against lowtime 0.3.0, the solver behind Zeus and Perseus, on the same profile in one run.

    pip install lowtime==0.3.0
    python benchmarks/planner_vs_lowtime.py PROFILE.csv [num_microbatches=12] [p2p_blocking_power_w=85] [steps=0]

Prints one JSON line: CPU seconds of both, their ratio, and how much less energy our plans need at the times of
lowtime's. lowtime emits a plan per millisecond of iteration time, and all of them lie on the way to the fastest, so
its time is that of the whole run. `steps` stops it earlier, for pipelines where it takes an hour: its time is then
estimated from its first steps, which are the quickest, so that the ratio comes out too small (8 x 96: 9 minutes
estimated, 52 measured). Nothing is warmed up but imports: ours plans another pipeline before.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
from lowtime.cost_model import ExponentialModel
from lowtime.graph_utils import add_sink_node, add_source_node, get_critical_aon_dag_total_time
from lowtime.operation import CandidateExecutionOptions, ExecutionOption, Operation, OperationSpec
from lowtime.solver import PhillipsDessouky

from lightning_pfo.core.pipeline_schedule import make_schedule
from lightning_pfo.planner import Profile, plan_frontier, read_profile, simulate
from lightning_pfo.planner.instruction_dag import schedule_dag

UNIT_TIME_S = 0.001


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


def lowtime_plans(graph: nx.DiGraph, num_nodes: int, steps: int) -> Iterator[list[int]]:
    """The clock of every instruction after each step of lowtime, slow to fast."""
    for step, _ in enumerate(PhillipsDessouky(graph).run(), 1):
        yield [graph.nodes[number]["op"].assigned_knob for number in range(num_nodes)]
        if step == steps:
            return


def quantised_span(graph: nx.DiGraph) -> int:
    """Number of steps of a whole run: quantised time with all operations slowest less that with all fastest."""
    span = []
    for extreme in ("max_duration", "min_duration"):
        for _, data in graph.nodes(data=True):
            if not data["op"].is_dummy:
                data["op"].duration = getattr(data["op"], extreme)
        span.append(get_critical_aon_dag_total_time(graph))
    return span[0] - span[1]


def main() -> None:
    """Run both and print what came out."""
    logging.disable(logging.INFO)
    settings = dict(argument.split("=", 1) for argument in sys.argv[2:])
    num_microbatches = int(settings.get("num_microbatches", 12))
    power_w = float(settings.get("p2p_blocking_power_w", 85))
    steps = int(settings.get("steps", 0))
    profile = read_profile(Path(sys.argv[1]))
    schedule = make_schedule("1f1b", profile.num_stages, num_microbatches)
    powers = [power_w] * profile.num_stages

    plan_frontier(profile, num_microbatches=profile.num_stages, p2p_blocking_power_w=power_w, num_plans=2)  # warm up
    begin = time.process_time()
    frontier = plan_frontier(profile, num_microbatches=num_microbatches, p2p_blocking_power_w=power_w)
    ours_s = time.process_time() - begin
    gaps = sorted(plan.gap for plan in frontier.plans)

    graph = operation_dag(profile, num_microbatches, power_w)
    expected_steps = quantised_span(operation_dag(profile, num_microbatches, power_w))
    begin = time.process_time()
    knobs = list(lowtime_plans(graph, len(schedule.instructions), steps))
    theirs_s = time.process_time() - begin
    estimated = bool(steps) and len(knobs) < expected_steps
    if estimated:
        theirs_s *= expected_steps / len(knobs)

    result = {
        "pipeline": f"{profile.num_stages} x {num_microbatches}",
        "ours_cpu_s": round(ours_s, 3),
        "our_plans": len(frontier.plans),
        "median_gap_percent": round(100 * gaps[len(gaps) // 2], 3),
        "largest_gap_percent": round(100 * gaps[-1], 3),
        "lowtime_cpu_s": round(theirs_s, 1),
        "lowtime_is_estimated": estimated,
        "lowtime_plans": expected_steps if estimated else len(knobs),
        "ratio": round(theirs_s / ours_s),
    }
    if not estimated:
        per_rank = len(schedule.orders[0])
        theirs = []
        for knob in knobs[:: max(len(knobs) // 50, 1)] + knobs[-1:]:
            rows = [knob[first : first + per_rank] for first in range(0, len(knob), per_rank)]
            timeline = simulate(profile, schedule, rows, powers)
            theirs.append((timeline.iteration_time_s, timeline.iteration_energy_j))
        ours = plan_frontier(
            profile,
            num_microbatches=num_microbatches,
            p2p_blocking_power_w=power_w,
            deadlines_s=[time_s for time_s, _ in theirs],
        )
        differences = sorted(
            100 * (1 - min(p.iteration_energy_j for p in ours.plans if p.iteration_time_s <= t * (1 + 1e-9)) / e)
            for t, e in theirs
        )
        result["less_energy_than_lowtime_percent"] = {
            "least": round(differences[0], 3),
            "median": round(differences[len(differences) // 2], 3),
            "most": round(differences[-1], 3),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
