"""The plans of an experiment: that of `plan`, those of `plan.compare`, and what EnvPipe's reconfiguration has made."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from lightning_pfo.callbacks.frequency_plan import TOP_CLOCKS
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.experiment.checks import policy_of
from lightning_pfo.experiment.config import ExperimentConfig
from lightning_pfo.experiment.processes import is_first_process
from lightning_pfo.experiment.training import planning_of
from lightning_pfo.planner import Frontier, plan_frontier, save_frontier, select_plan
from lightning_pfo.planner.frontier.data import OURS
from lightning_pfo.planner.settings import PlanSettings


def plan_experiment(config: ExperimentConfig, output_dir: Path) -> tuple[Frontier, FrequencyPlan]:
    """The frontier of `plan`, which is saved, and the plan that is selected.

    Args:
        config: The experiment.
        output_dir: Where the profile is, if the experiment has measured it, and where plans are written.

    Raises:
        PlanError: If no plan meets `config.plan.select`.
    """
    settings = dataclasses.replace(planning_of(config), policy=policy_of(config.plan))
    frontier = _frontier(config, output_dir, settings, config.schedule.name)
    select = config.plan.select
    chosen = frontier.baseline if select == TOP_CLOCKS else select_plan(frontier, select)
    if is_first_process():
        save_frontier(frontier, output_dir / "plans")
    return frontier, chosen


def plan_others(config: ExperimentConfig, output_dir: Path, frontier: Frontier) -> dict[str, FrequencyPlan]:
    """What each policy of `plan.compare` takes itself, under the order of the training.

    Args:
        config: The experiment.
        output_dir: Where the profile is, if the experiment has measured it.
        frontier: That of `plan`.
    """
    chosen = {}
    for name in config.plan.compare:
        settings = dataclasses.replace(planning_of(config), policy=name)
        if name != OURS:  # which alone reckons with these
            settings = dataclasses.replace(settings, least_dwell_s=0.0, change_cost_j=0.0, deadlines_s=[])
        chosen[name] = select_plan(_frontier(config, output_dir, settings, frontier.schedule.name), "own")
    return chosen


def reconfigured(frontier: Frontier, plan: FrequencyPlan, name: str) -> tuple[Frontier, FrequencyPlan]:
    """A frontier of the one plan that a reconfiguration has ended with, and that plan as the profile predicts it.

    What is proven of slower plans holds for it.

    Args:
        frontier: What it began with.
        plan: What it ended with.
        name: What the policy is called.
    """
    timeline = frontier.timeline(plan)
    time_s = timeline.iteration_time_s
    slower = [one for one in (frontier.baseline, *frontier.plans) if one.iteration_time_s >= time_s]
    plan = dataclasses.replace(
        plan,
        iteration_time_s=time_s,
        iteration_energy_j=timeline.iteration_energy_j,
        lower_bound_j=max((one.lower_bound_j for one in slower), default=0.0),
    )
    return dataclasses.replace(frontier, plans=(plan,), own_choice=plan, policy=name), plan


def _frontier(config: ExperimentConfig, output_dir: Path, settings: PlanSettings, schedule: str) -> Frontier:
    return plan_frontier(
        config.profile or output_dir / "profile.csv",
        settings,
        num_microbatches=config.schedule.num_microbatches,
        schedule=schedule,
    )
