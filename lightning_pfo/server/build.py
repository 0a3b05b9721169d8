"""From settings to what a server consists of, but for HTTP."""

from __future__ import annotations

import time
from pathlib import Path

from lightning_pfo.planner.frontier.frontier_files import load_frontier
from lightning_pfo.planner.settings import PlanSettings
from lightning_pfo.server.jobs.director import Director, FrontierDirector, SolutionDirector
from lightning_pfo.server.jobs.dump import Dump
from lightning_pfo.server.jobs.registry import JobLimits, JobRegistry
from lightning_pfo.server.jobs.store import IN_MEMORY, JobStore
from lightning_pfo.server.settings import ServerSettings


def make_registry(settings: ServerSettings) -> JobRegistry:
    """Read what plans come from, and the jobs that go on.

    Raises:
        PfoError: If a file cannot be used.
    """
    director = _director(settings)
    return JobRegistry(
        director,
        JobStore(settings.state_path),
        JobLimits(most_jobs=settings.max_jobs, idle_s=settings.idle_s, silence_s=settings.silence_s),
        now=time.monotonic,
        dump=Dump(Path(settings.dump_dir)) if settings.dump_dir else None,
    )


def _director(settings: ServerSettings) -> Director:
    if settings.frontier:
        return FrontierDirector(load_frontier(settings.frontier), settings.select)
    if settings.solution_path:
        return SolutionDirector(settings.solution_path)
    plan_settings = PlanSettings(**{name: getattr(settings, name) for name in PlanSettings.__dataclass_fields__})
    assert settings.num_microbatches is not None  # the settings are checked
    if settings.profile:
        from lightning_pfo.planner.plan import plan_frontier  # a solver, which most servers need not load

        frontier = plan_frontier(
            settings.profile,
            plan_settings,
            num_microbatches=settings.num_microbatches,
            schedule=settings.schedule,
        )
        return FrontierDirector(frontier, settings.select)
    from lightning_pfo.server.jobs.online import OnlineDirector
    from lightning_pfo.server.jobs.verifying import Verifying

    return OnlineDirector(
        _job_folder(settings),
        schedule=settings.schedule,
        num_microbatches=settings.num_microbatches,
        settings=plan_settings,
        select=settings.select,
        clock_step_mhz=settings.clock_step_mhz,
        is_adaptive=settings.profiler == "adaptive",
        verifying=Verifying(settings.verify_pairs, settings.tolerance),
    )


def _job_folder(settings: ServerSettings) -> Path:
    """Where profiles and frontiers of jobs are: beside the state."""
    state = settings.state_path
    return Path("pfo-jobs") if state == IN_MEMORY else Path(state).with_suffix(".jobs")
