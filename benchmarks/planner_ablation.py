"""What each part of the planner brings: frontiers of 50 plans with and without it, on the pipelines of `pipelines`.

    python benchmarks/planner_ablation.py [VARIANT,VARIANT,...] [WORD ...] [repeats=1] [verbose=true]

Only pipelines whose names contain one of the words are planned (`a40`, `8x12`, `"as measured"`; all without words:
half an hour). Gaps are those against the bound that the best effort proves at the plan's own time, so that a variant is
not praised for plans that its own, looser bound flatters; *own* are the gaps that a user of the variant is told. Times
are CPU times of this process (`time.process_time`), the least of `repeats`; on a shared machine they come out higher.

Prints a table in Markdown with a row for each variant and group of pipelines: means of the median gap and of the saving
at the top clocks' time, the largest gap, distance to the bound there and CPU time of the worst pipeline.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

import numpy as np
from pipelines import Pipeline, evaluation_set

from lightning_pfo.planner.network.assignments import OptionTable
from lightning_pfo.planner.pipeline.problem import Problem, schedule_network
from lightning_pfo.planner.plan import predict, solver_for, top_clocks
from lightning_pfo.planner.profile.blocking_power import resolve_blocking
from lightning_pfo.planner.relaxation.bound import LowerBound
from lightning_pfo.planner.search.effort import EFFORTS, Aim, Effort, Round
from lightning_pfo.planner.search.pool import TradeoffPoint

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Result:
    """A frontier of one pipeline; gaps and savings in per cent.

    Attributes:
        gaps: Of each plan, against the best bound.
        own_gaps: Against its own.
        saving: At the top clocks' time, against the top clocks.
        distance: Of that plan to the best bound, in points of the top clocks' energy.
        cpu_s: CPU time.
    """

    gaps: list[float]
    own_gaps: list[float]
    saving: float
    distance: float
    cpu_s: float


def variants() -> dict[str, Effort]:
    """The default effort, the other two, and what remains of the default without each of its parts."""
    full = EFFORTS["default"]

    def without(change: Callable[[Effort], Effort]) -> Effort:
        """The default changed, in short networks as well."""
        return replace(change(full), short=full.short and change(full.short))

    def in_all_rounds(**changes: float) -> Effort:
        return without(lambda effort: replace(effort, rounds=tuple(replace(work, **changes) for work in effort.rounds)))

    def with_kept_aims(choose: Callable[[Round], tuple[Aim, ...]]) -> Effort:
        return without(
            lambda effort: replace(
                effort, rounds=tuple(replace(work, kept_aims=choose(work)) for work in effort.rounds)
            )
        )

    return {
        "default": full,
        "fast": EFFORTS["fast"],
        "best": EFFORTS["best"],
        "no further rounds": without(lambda effort: replace(effort, rounds=effort.rounds[:1])),
        "no wide round": without(lambda effort: replace(effort, rounds=effort.rounds[:2])),
        "no splicing": in_all_rounds(spliced_pairs=0),
        "no recombining": in_all_rounds(seams=0),
        "no moves of events": in_all_rounds(moved_per_target=0.0),
        "no relaxations of their own": without(lambda effort: replace(effort, own_relaxations=0)),
        "no loss of rounding proven": without(lambda effort: replace(effort, nodes_per_sharpened_flow=10**9)),
        "half as many relaxations": without(lambda effort: replace(effort, points_per_relaxation=10.4)),
        "one guide to a kept time": with_kept_aims(lambda work: work.kept_aims[:1]),
        "twelve guides to a kept time": with_kept_aims(lambda work: EFFORTS["best"].rounds[-1].kept_aims),
    }


def trace(problem: Problem, effort: Effort, bound: LowerBound, top_s: float) -> list[TradeoffPoint]:
    """A frontier of 50 plans, the top clocks' time among them."""
    return solver_for(problem.schedule)(
        problem.network,
        problem.options,
        rate=problem.power_w,
        num_points=50,
        times=[top_s],
        deadlines=(),
        effort=effort,  # type: ignore[arg-type]
        bound=bound,
        on_progress=None,
    )


def measure(pipeline: Pipeline, efforts: Mapping[str, Effort], repeats: int) -> dict[str, Result]:
    """Plan a pipeline by each variant."""
    schedule_network.cache_clear()
    blocking = resolve_blocking(pipeline.profile, pipeline.schedule, pipeline.power_w)
    problem = Problem(pipeline.profile, pipeline.schedule, blocking)
    top = predict(problem, top_clocks)

    def fresh_bound() -> LowerBound:
        return LowerBound(OptionTable(problem.network, problem.options), problem.power_w)

    def timed(effort: Effort, times: int) -> tuple[list[TradeoffPoint], LowerBound, float]:
        used_s = []
        for _ in range(times):
            schedule_network.cache_clear()
            begin, bound = time.process_time(), fresh_bound()
            points = trace(problem, effort, bound, top.iteration_time_s)
            used_s.append(time.process_time() - begin)
        return points, bound, min(used_s)

    best = timed(EFFORTS["best"], 1)
    reference = best[1]
    results = {}
    for name, effort in efforts.items():
        points, _, cpu_s = best if effort is EFFORTS["best"] else timed(effort, repeats)
        times, costs, own = np.array([(point.time, point.cost, point.bound) for point in points]).T
        bounds = np.maximum(reference.at(times), own)
        kept = np.flatnonzero(times <= top.iteration_time_s * (1 + TOLERANCE))[-1]
        results[name] = Result(
            gaps=(100 * (costs / bounds - 1)).tolist(),
            own_gaps=(100 * (costs / own - 1)).tolist(),
            saving=100 * (1 - costs[kept] / top.iteration_energy_j),
            distance=100 * (costs[kept] - bounds[kept]) / top.iteration_energy_j,
            cpu_s=cpu_s,
        )
    return results


def group_of(name: str) -> str:
    """The group of pipelines that one is counted in."""
    if "emulated" in name:
        return "emulated GPUs"
    if any(schedule in name for schedule in ("gpipe", "interleaved", "zbv", "envpipe")):
        return "other schedules, all stages different"
    if any(word in name for word in ("1 %", "3 %", "0.8..1.25", "16 stages")):
        return "all stages different"
    return "as measured" if "as measured" in name else "other changes"


def row(variant: str, results: Sequence[Result]) -> str:
    """A row of the table."""
    columns = [
        f"{mean(median(result.gaps) for result in results):.3f}",
        f"{max(max(result.gaps) for result in results):.2f}",
        f"{mean(median(result.own_gaps) for result in results):.3f}",
        f"{max(max(result.own_gaps) for result in results):.2f}",
        f"{mean(result.saving for result in results):.3f}",
        f"{max(result.distance for result in results):.2f}",
        f"{mean(result.cpu_s for result in results):.3f}",
        f"{max(result.cpu_s for result in results):.2f}",
    ]
    return f"| {variant} | {' | '.join(columns)} |"


def main() -> None:
    """Plan all and print the table."""
    settings = dict(argument.split("=", 1) for argument in sys.argv[1:] if "=" in argument)
    words = [argument for argument in sys.argv[1:] if "=" not in argument]
    efforts = variants()
    if words and all(name in efforts for name in words[0].split(",")):
        efforts = {name: efforts[name] for name in words.pop(0).split(",")}
    repeats = int(settings.get("repeats", 1))
    groups: dict[str, list[dict[str, Result]]] = {}
    pipelines = evaluation_set(words)
    measure(pipelines[0], {"default": EFFORTS["default"]}, 1)  # imports
    for pipeline in pipelines:
        results = measure(pipeline, efforts, repeats)
        if settings.get("verbose") == "true":
            for name, result in results.items():
                shown = {
                    "median": median(result.gaps),
                    "largest": max(result.gaps),
                    "own_median": median(result.own_gaps),
                    "own_largest": max(result.own_gaps),
                    "saving": result.saving,
                    "distance": result.distance,
                    "cpu_s": result.cpu_s,
                }
                rounded = {key: round(value, 3) for key, value in shown.items()}
                print(json.dumps({"pipeline": pipeline.name, "variant": name} | rounded), flush=True)
        size = "8x12" if pipeline.name.endswith("8x12") else "longer"
        groups.setdefault(f"{group_of(pipeline.name)}, {size}", []).append(results)
    for group, members in groups.items():
        print(f"\n{group} ({len(members)} pipelines)\n")
        print("| | median gap | largest | own median | own largest | saving | distance | CPU, mean | CPU, most |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in efforts:
            print(row(name, [results[name] for results in members]))


if __name__ == "__main__":
    main()
