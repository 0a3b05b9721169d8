"""Every instruction at its stage's top clock: as a GPU runs that nobody tells anything."""

from __future__ import annotations

from lightning_pfo.planner.pipeline.problem import Problem, Rows


def top_clocks(problem: Problem, deadline_s: float | None = None) -> Rows:
    """The top clocks; a deadline changes nothing (see `Policy`)."""
    top_mhz = [problem.profile.top_clock_mhz(stage) for stage in range(problem.schedule.num_stages)]
    return problem.schedule.by_rank([top_mhz[inst.stage] for inst in problem.schedule.instructions])
