"""Who is the first rank within a step.

Users write `if self.global_rank == 0` around what is to happen once, with what the step has computed by then. Under
DDP that is the first process; on a pipeline the rank that runs the step to its end has these values, and it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_pfo.strategy.step.effects.within import step_ends_here


def rank_in_step(rank: int, first: int) -> int:
    """A rank's number on its node within a step: who runs it to its end is the first of its replica, and nobody else.

    Args:
        rank: The number otherwise.
        first: That of the first of the replica.
    """
    if step_ends_here():
        return first
    return first + 1 if rank == first else rank


def for_first_rank(step: Callable[..., Any], rank: Callable[[], int]) -> Callable[..., Any]:
    """A step in which `rank_zero_only` goes by that number too.

    Args:
        step: The step.
        rank: Tells it, within the step.
    """

    def run(*args: Any) -> Any:
        of_process = rank_zero_only.rank  # type: ignore[attr-defined]
        rank_zero_only.rank = rank()  # type: ignore[attr-defined]
        try:
            return step(*args)
        finally:
            rank_zero_only.rank = of_process  # type: ignore[attr-defined]

    return run
