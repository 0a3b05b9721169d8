"""What a policy is."""

from __future__ import annotations

from typing import Protocol

from lightning_pfo.planner.pipeline.problem import Problem, Rows


class Policy(Protocol):
    """A rule that gives every instruction of an iteration a clock."""

    def __call__(self, problem: Problem, deadline_s: float | None = None) -> Rows:
        """Choose the clocks.

        Args:
            problem: The pipeline.
            deadline_s: Iteration time in seconds to keep to where the policy can; None leaves it to the policy.

        Returns:
            Clock of each instruction in MHz, one row per rank in execution order.
        """
        ...
