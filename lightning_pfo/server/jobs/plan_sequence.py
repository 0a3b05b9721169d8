"""The plans of a job that some rank may still have to follow, each from a step on.

A rank is told of one change at a time, and promised nothing beyond the next one. Were it told of the latest plan only,
it would keep the first of three where another rank, which has asked in between, follows the second.
"""

from __future__ import annotations

from itertools import zip_longest

from lightning_pfo.server.jobs.messages import VersionedPlan

_MOST_PLANS = 100
"""More are kept only where a rank has long been silent."""


class PlanSequence:
    """Plans in the order of their versions and of their first steps."""

    def __init__(self) -> None:
        self._plans: list[VersionedPlan] = []

    @property
    def latest(self) -> VersionedPlan | None:
        """The last one; None before there is one."""
        return self._plans[-1] if self._plans else None

    def add(self, plan: VersionedPlan) -> None:
        """A new plan, in the place of those that would have begun at its own first step or later."""
        self._plans = [*(one for one in self._plans if one.from_step < plan.from_step), plan][-_MOST_PLANS:]

    def next_for(self, version: int, step: int) -> tuple[VersionedPlan | None, int | None]:
        """What a rank follows next, and the first step of what comes after that.

        Args:
            version: The latest that it knows.
            step: The step it is at.

        Returns:
            The first plan that it does not know and that is not over at its step, and the step at which that is; None
            where there is none.
        """
        unknown = [
            (plan, over_at)
            for plan, over_at in self._with_ends()
            if plan.version > version and (over_at is None or over_at > step)
        ]
        return unknown[0] if unknown else (None, None)

    def forget_before(self, step: int) -> None:
        """No rank is before this step any more."""
        self._plans = [plan for plan, over_at in self._with_ends() if over_at is None or over_at > step]

    def _with_ends(self) -> list[tuple[VersionedPlan, int | None]]:
        ends = [after.from_step for after in self._plans[1:]]
        return [*zip_longest(self._plans, ends)]
