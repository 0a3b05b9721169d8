"""Thinning a frontier: fewer plans to look at, to keep, or to measure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.ranges import NUM_PLANS, Quantity
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.frontier.data import Frontier

_EVERY = Quantity("a number of plans", "", 1, 10**9, is_whole=True)


def thin_frontier(
    frontier: Frontier, *, every: int = 1, num_plans: int | None = None, keep: Collection[FrequencyPlan] = ()
) -> Frontier:
    """Keep some of the plans; they are numbered anew.

    The fastest plan and the one of least energy always stay, and what another policy takes itself; straggler plans are
    left as they are.

    Args:
        frontier: What to thin.
        every: Keep each `every`-th plan, counted from the fastest.
        num_plans: Of these keep about so many, evenly spread over iteration times; None keeps all.
        keep: Plans that stay in any case.

    Raises:
        ConfigurationError: If a number is out of range.
    """
    if not _EVERY.allows(every) or not (num_plans is None or NUM_PLANS.allows(num_plans)):
        raise ConfigurationError(
            "every must be at least 1 and num_plans at least 2 (fastest and least energy), the latter at most "
            f"{NUM_PLANS.most:,}; got every={shortened(every)} and num_plans={shortened(num_plans)}."
        )
    plans = frontier.plans
    ends = {0, len(plans) - 1}
    chosen = {*range(0, len(plans), every), *ends}
    if num_plans is not None and num_plans < len(chosen):
        first_s, last_s = plans[0].iteration_time_s, plans[-1].iteration_time_s
        wanted_s = [first_s + (last_s - first_s) * step / (num_plans - 1) for step in range(1, num_plans - 1)]
        candidates = sorted(chosen)
        chosen = ends | {min(candidates, key=lambda i: abs(plans[i].iteration_time_s - time_s)) for time_s in wanted_s}
    return replace(
        frontier,
        plans=tuple(plan for i, plan in enumerate(plans) if i in chosen or plan in keep or plan is frontier.own_choice),
    )
