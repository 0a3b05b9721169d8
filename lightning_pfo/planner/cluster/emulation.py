"""What a data-parallel job takes and costs under each policy, when some of its replicas are slow.

All replicas wait for the slowest, so an iteration takes

    D = max over replicas of (factor x time of the plan that the policy takes without stragglers)

A replica whose iteration would end before that runs a slower plan, if its policy has some and reacts (Perseus, and the
planner's own): the plan of least energy, waiting included, among those that are ready by D, straggler plans among them
(`Frontier.straggler_plans`; there are as many as others, if nothing else is said). Every replica, whatever its
policy, costs what its plan costs and the blocking power of its GPUs for the rest of D::

    energy = energy of the plan + blocking power x (D - time of the plan)

The time by which a straggler is slower counts as waiting too: its work is the same, and what else it draws is not
known. Nothing is clamped: a policy whose own plan is slower than the top clocks is slower here too. All of it is
predicted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.core.ranges import check_whole
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.cluster.stragglers import straggler_factors
from lightning_pfo.planner.frontier.data import OURS, Frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.planner.network.arrays import Floats
from lightning_pfo.planner.plan import plan_frontier
from lightning_pfo.planner.policies.policy import Policy
from lightning_pfo.planner.policies.registry import find_policy
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.settings import PlanSettings

if TYPE_CHECKING:
    import pandas as pd

_SAME_TIME = 1e-9
_MOMENTS = 288
"""Of a day: one in five minutes."""


@dataclass(frozen=True, eq=False)
class EmulatedPolicy:
    """A policy over the whole time; the entries of its arrays are moments.

    Attributes:
        name: Its name.
        reacts: Whether it has other plans beside a straggler.
        own_time_s: Iteration time without stragglers.
        times_s: Iteration time of the job.
        energies_j: Energy of all replicas per iteration.
    """

    name: str
    reacts: bool
    own_time_s: float
    times_s: Floats
    energies_j: Floats

    @property
    def iteration_time_s(self) -> float:
        """Mean over the moments."""
        return float(self.times_s.mean())

    @property
    def iteration_energy_j(self) -> float:
        """Mean over the moments."""
        return float(self.energies_j.mean())


@dataclass(frozen=True, eq=False)
class Emulation:
    """A job of many replicas.

    Attributes:
        factors: By which factor each replica is slower, shape (moments, pipelines).
        baseline: Every replica at the top clocks.
        policies: Each policy by name.
        description: Of what pipeline, in words.
    """

    factors: Floats
    baseline: EmulatedPolicy
    policies: dict[str, EmulatedPolicy]
    description: str

    def saving_percent(self, name: str) -> float:
        """Energy that a policy saves against the top clocks, over the same number of iterations."""
        return saving_percent(self.policies[name].iteration_energy_j, self.baseline.iteration_energy_j)

    def slowdown_percent(self, name: str) -> float:
        """By how much the job is slower than at the top clocks."""
        return 100 * (self.policies[name].iteration_time_s / self.baseline.iteration_time_s - 1)

    def as_dict(self) -> dict[str, dict[str, float]]:
        """The figures of each policy by name."""
        return {
            name: {
                "iteration_time_s": policy.iteration_time_s,
                "iteration_energy_j": policy.iteration_energy_j,
                "saving_percent": self.saving_percent(name),
                "slowdown_percent": self.slowdown_percent(name),
            }
            for name, policy in self.policies.items()
        }


def emulate(
    profile: Profile | str | os.PathLike[str] | pd.DataFrame,
    *,
    num_pipelines: int,
    stragglers: str | float | Sequence[Sequence[float]] | Floats = "day",
    policy: str | Policy | Sequence[str | Policy] = OURS,
    num_microbatches: int | None = None,
    schedule: str | PipelineSchedule = "1f1b",
    num_moments: int = _MOMENTS,
    seed: int = 0,
    **changes: Any,
) -> Emulation:
    """Calculate what a job of many replicas takes and costs.

    Args:
        profile: Measurements of one pipeline, the path of their CSV file, or a pandas table with its columns.
        num_pipelines: Number of replicas.
        stragglers: How slow replicas are: a name or a number (`stragglers`), or a table of factors by moment.
        policy: Name of a policy, or several; or policies of your own.
        num_microbatches: Microbatches per iteration and pipeline.
        schedule: Name of a schedule, or the order itself.
        num_moments: Into how many parts the day is divided; a number or a table says itself how many there are.
        seed: Of the random draws.
        **changes: Fields of `PlanSettings`, such as num_plans=20 or p2p_blocking_power_w=85.

    Raises:
        ProfileError: If the profile cannot be used, or has no blocking power and none is given.
        ConfigurationError: If an argument is out of range.
    """
    check_whole("num_pipelines", num_pipelines, 1, 1_000_000)
    check_whole("num_moments", num_moments, 1, 1_000_000)
    wanted = list(policy) if isinstance(policy, Sequence) and not isinstance(policy, str) else [policy]
    if not wanted:
        raise ConfigurationError("policy is the name of a policy, or a list of at least one; got none.")
    for one in wanted:
        find_policy(one)  # type: ignore[arg-type]
    factors = straggler_factors(stragglers, num_pipelines, num_moments, seed)
    planned = {"num_straggler_plans": changes.get("num_plans", PlanSettings.num_plans), **changes}
    settings = {"num_microbatches": num_microbatches, "schedule": schedule, **planned}
    frontiers = [plan_frontier(profile, policy=one, **settings) for one in wanted]
    top = frontiers[0]
    blocking_w = sum(top.p2p_blocking_powers_w)
    return Emulation(
        factors,
        _play("max_frequency", top.baseline, [top.baseline], blocking_w, factors),
        {one.policy: emulate_frontier(one, factors) for one in frontiers},
        f"{num_pipelines:,} pipelines of {top.schedule.num_stages} x {top.schedule.num_microbatches}",
    )


def emulate_frontier(frontier: Frontier, factors: Floats) -> EmulatedPolicy:
    """A policy, from its frontier.

    Args:
        frontier: Its plans for one pipeline.
        factors: By which factor each replica is slower, shape (moments, pipelines).
    """
    own, policy = select_plan(frontier, "own"), find_policy(frontier.policy)
    reacts = policy is None or policy.reacts
    plans = [own, *frontier.plans, *frontier.straggler_plans] if reacts else [own]
    return _play(frontier.policy, own, plans, sum(frontier.p2p_blocking_powers_w), factors)


def _play(
    name: str, own: FrequencyPlan, plans: Sequence[FrequencyPlan], blocking_w: float, factors: Floats
) -> EmulatedPolicy:
    times_s = factors.max(axis=1) * own.iteration_time_s
    # Energy without waiting, of the cheapest plan that is ready in time.
    in_order = sorted(plans, key=lambda plan: plan.iteration_time_s)
    ready_s = np.array([plan.iteration_time_s for plan in in_order])
    busy_j = np.array([plan.iteration_energy_j - blocking_w * plan.iteration_time_s for plan in in_order])
    least_j = np.minimum.accumulate(busy_j)
    allowed_s = times_s[:, None] / factors * (1 + _SAME_TIME)
    number = np.searchsorted(ready_s, allowed_s, side="right") - 1
    energies_j = least_j[number].sum(axis=1) + factors.shape[1] * blocking_w * times_s
    return EmulatedPolicy(name, len(plans) > 1, own.iteration_time_s, times_s, energies_j)
