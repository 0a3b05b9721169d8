"""Replicas of a pipeline wait for the slowest at the gradient all-reduce; who waits anyway may as well be slower.

::

    replica 0   |=== busy ===|   waits   | all-reduce        T' = how long the slowest is busy
    replica 1   |======== busy ==========| all-reduce

A replica that was slowed down for another's sake is no straggler itself: what counts is how long it would be busy
under its own plan. So when the straggler recovers, the others go back, instead of waiting for each other for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.device.time import TimeSource
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import select_plan

_NOTICEABLE = 0.02
"""Of the time of an iteration: shorter waits are noise."""


@dataclass(frozen=True)
class Busy:
    """What a rank says of its pipeline.

    Attributes:
        replica: Which one.
        busy_s: From the begin of an iteration until the rank's last instruction was over, s.
        promised_s: Time of the plan that it follows, s; nan where none does.
        own_s: Time of the plan that it would follow by itself, s.
        t_prime_s: What a scheduler has told: iteration time of a straggler, s.
    """

    replica: int
    busy_s: float
    promised_s: float
    own_s: float
    t_prime_s: float | None = None


def t_prime_of(replica: int, told: Sequence[Busy]) -> float | None:
    """The straggler's iteration time for a replica, s; None where it need not wait for any.

    Args:
        replica: Which one.
        told: What all ranks say.
    """
    natural_s: dict[int, float] = {}
    for one in told:
        is_own = not one.promised_s > one.own_s
        busy_s = one.busy_s if is_own else one.busy_s * one.own_s / one.promised_s
        natural_s[one.replica] = max(natural_s.get(one.replica, 0.0), busy_s)
    declared = [one.t_prime_s for one in told if one.t_prime_s is not None]
    slowest_s = max([*natural_s.values(), *declared])
    return slowest_s if slowest_s > (1 + _NOTICEABLE) * natural_s[replica] else None


class Replicas:
    """How long this rank is busy, and which plans the replicas follow beside each other.

    Args:
        source: The pipeline rank.
    """

    def __init__(self, source: InstructionSource) -> None:
        self._source = source
        self._begin_s = self._busy_s = 0.0
        self._t_prime_s: float | None = None

    def begin(self, time_source: TimeSource) -> None:
        """The GPU begins an iteration."""
        self._begin_s = time_source.now_s()

    def end(self, time_source: TimeSource) -> None:
        """The GPU has done the rank's last instruction of it."""
        self._busy_s = time_source.now_s() - self._begin_s

    def set_straggler(self, t_prime_s: float | None) -> None:
        """See `OptimizedRun.set_straggler`."""
        if t_prime_s is not None and not 0 < t_prime_s < math.inf:
            raise ConfigurationError(f"t_prime_s is an iteration time in seconds above 0; got {t_prime_s}.")
        self._t_prime_s = t_prime_s

    def wanted(
        self, frontier: Frontier, plan: FrequencyPlan, applied: FrequencyPlan
    ) -> dict[int, FrequencyPlan] | None:
        """The plan of each replica; None where they all follow theirs. A collective call.

        Args:
            frontier: The plans.
            plan: What each would follow by itself.
            applied: What this one follows.
        """
        replica = self._source.place[0]
        mine = Busy(replica, self._busy_s, applied.iteration_time_s, plan.iteration_time_s, self._t_prime_s)
        told: list[Busy] = self._source.all_gather(mine, everywhere=True)
        plans = {one.replica: _beside(frontier, plan, t_prime_of(one.replica, told)) for one in told}
        is_new = any(plans[one.replica].iteration_time_s != one.promised_s for one in told)
        return plans if is_new else None


def _beside(frontier: Frontier, plan: FrequencyPlan, t_prime_s: float | None) -> FrequencyPlan:
    """The plan beside a straggler: never a faster one than without."""
    if t_prime_s is None or t_prime_s <= plan.iteration_time_s:
        return plan
    return select_plan(frontier, f"T'={t_prime_s!r}s")
