"""From a profile to a frontier of frequency plans; never imports torch.

The way of the data, and the order in which to read: `profile` (what was measured), `network` and `pipeline` (the
problem), `relaxation` (lower bounds), `search` (plans near the bound), `frontier` (the result and its files),
`limits` (GPUs that change clocks slowly). `plan` tells it as a story; `policies` are other systems' plans,
`policy_frontier` makes frontiers of them, `comparison` sets them side by side, and `cluster` calculates what
they take where some of many replicas are slow. `adaptive` plans while a job trains, and checks what it promised.

Names are imported when they are first used, so that reading a frontier does not load a solver.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_pfo.planner.cluster.emulation import Emulation, emulate
    from lightning_pfo.planner.comparison import Comparison, compare
    from lightning_pfo.planner.frontier.data import Frontier
    from lightning_pfo.planner.frontier.frontier_files import load_frontier, save_frontier
    from lightning_pfo.planner.frontier.select import check_selection, select_plan
    from lightning_pfo.planner.frontier.thin import thin_frontier
    from lightning_pfo.planner.frontier.zeus_files import read_zeus_plan
    from lightning_pfo.planner.pipeline.timeline import Timeline, simulate, simulate_plan
    from lightning_pfo.planner.plan import plan_frontier
    from lightning_pfo.planner.profile.denoise import Regularised, regularise
    from lightning_pfo.planner.profile.profile import InstructionProfile, Profile
    from lightning_pfo.planner.profile.profile_csv import read_profile, write_profile
    from lightning_pfo.planner.search.time_cost_tradeoff import TimeCostPoint, solve_time_cost_tradeoff
    from lightning_pfo.planner.settings import PlanSettings

_MODULE_OF = {
    "Comparison": "comparison",
    "Emulation": "cluster.emulation",
    "Frontier": "frontier.data",
    "InstructionProfile": "profile.profile",
    "PlanSettings": "settings",
    "Profile": "profile.profile",
    "Regularised": "profile.denoise",
    "TimeCostPoint": "search.time_cost_tradeoff",
    "Timeline": "pipeline.timeline",
    "check_selection": "frontier.select",
    "compare": "comparison",
    "emulate": "cluster.emulation",
    "load_frontier": "frontier.frontier_files",
    "plan_frontier": "plan",
    "read_profile": "profile.profile_csv",
    "read_zeus_plan": "frontier.zeus_files",
    "regularise": "profile.denoise",
    "save_frontier": "frontier.frontier_files",
    "select_plan": "frontier.select",
    "simulate": "pipeline.timeline",
    "simulate_plan": "pipeline.timeline",
    "solve_time_cost_tradeoff": "search.time_cost_tradeoff",
    "thin_frontier": "frontier.thin",
    "write_profile": "profile.profile_csv",
}

__all__ = [
    "Comparison",
    "Emulation",
    "Frontier",
    "InstructionProfile",
    "PlanSettings",
    "Profile",
    "Regularised",
    "TimeCostPoint",
    "Timeline",
    "check_selection",
    "compare",
    "emulate",
    "load_frontier",
    "plan_frontier",
    "read_profile",
    "read_zeus_plan",
    "regularise",
    "save_frontier",
    "select_plan",
    "simulate",
    "simulate_plan",
    "solve_time_cost_tradeoff",
    "thin_frontier",
    "write_profile",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
