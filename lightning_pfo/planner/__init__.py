"""From a profile to a frontier of frequency plans. Needs numpy and highspy only; never imports torch."""

from lightning_pfo.planner.frontier.frontier_files import load_frontier, save_frontier
from lightning_pfo.planner.frontier.select import check_selection, select_plan
from lightning_pfo.planner.frontier.thin import thin_frontier
from lightning_pfo.planner.frontier.zeus_files import read_zeus_plan
from lightning_pfo.planner.pipeline.timeline import Timeline, simulate, simulate_plan
from lightning_pfo.planner.plan import Frontier, plan_frontier
from lightning_pfo.planner.profile.denoise import Regularised, regularise
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile
from lightning_pfo.planner.profile.profile_csv import read_profile, write_profile
from lightning_pfo.planner.search.time_cost_tradeoff import TimeCostPoint, solve_time_cost_tradeoff

__all__ = [
    "Frontier",
    "InstructionProfile",
    "Profile",
    "Regularised",
    "TimeCostPoint",
    "Timeline",
    "check_selection",
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
