"""Every instruction at its stage's top clock: as a GPU runs that nobody tells anything."""

from __future__ import annotations

from lightning_pfo.planner.pipeline.problem import Problem, Rows


def top_clocks(problem: Problem, deadline_s: float | None = None) -> Rows:
    """The top clocks; a deadline changes nothing (see `Policy`)."""
    top_mhz = [problem.profile.top_clock_mhz(stage) for stage in range(problem.schedule.num_stages)]
    return problem.schedule.by_rank([top_mhz[inst.stage] for inst in problem.schedule.instructions])


def top_clocks_of_ranks(problem: Problem, deadline_s: float | None = None) -> Rows:
    """One clock for each rank, the highest that all of its instructions have; the top clocks of a rank without one."""
    rows = []
    for row, order in zip(top_clocks(problem), problem.schedule.orders, strict=True):
        measured = [problem.profile.of(inst.stage, inst.type).clocks_mhz for inst in order]
        common = set(measured[0]).intersection(*measured)
        rows.append((max(common),) * len(row) if common else row)
    return tuple(rows)
