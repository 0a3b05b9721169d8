"""Whether a user's step is under way on this rank: there, nobody may wait for ranks that do not run the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

_under_way: list[bool] = []
_without_replicas: list[None] = []
_alone: list[None] = []
_by_units: list[None] = []
_forward_only: list[None] = []


@contextmanager
def _noted(open_ones: list[None]) -> Iterator[None]:
    open_ones.append(None)
    try:
        yield
    finally:
        open_ones.pop()


class step_under_way:  # noqa: N801 - as `contextlib`'s; entered for each microbatch
    """Say that a step runs while the context is open.

    Args:
        ends_here: Whether it is run to its end, as on the last stage, and for real.
    """

    def __init__(self, *, ends_here: bool) -> None:
        self._ends_here = ends_here

    def __enter__(self) -> None:
        _under_way.append(self._ends_here)

    def __exit__(self, *_: object) -> None:
        _under_way.pop()


def within_step() -> bool:
    """Whether a step is under way."""
    return bool(_under_way)


def step_ends_here() -> bool:
    """Whether the step that is under way is run to its end here."""
    return bool(_under_way) and _under_way[-1]


def step_meets_replicas() -> bool:
    """Whether the step that is under way is run to its end here, as by other replicas at the same time."""
    return step_ends_here() and not _alone


def replica_alone() -> AbstractContextManager[None]:
    """Say that this replica alone runs steps, to compare what they come to, while the context is open."""
    return _noted(_alone)


def runs_alone() -> bool:
    """Whether that context is open."""
    return bool(_alone)


class Elsewhere(int):
    """A rank's number where a step that is under way is not run to its end.

    It counts as what it is there (`labels + n * rank`), and is none that somebody asks for, nor the first: what is done
    `if rank == 0` is done where the step ends, once.
    """

    def __eq__(self, other: object) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return True

    def __gt__(self, other: int) -> bool:
        return other == 0 or super().__gt__(other)

    def __ge__(self, other: int) -> bool:
        return other == 1 or super().__ge__(other)

    def __bool__(self) -> bool:
        return True

    __hash__ = int.__hash__


def number_in_step(number: int) -> int:
    """A rank's number within a step: that of its replica, `Elsewhere` where the step is not run to its end."""
    return number if step_ends_here() else Elsewhere(number)


def step_by_units() -> AbstractContextManager[None]:
    """Say that all ranks run the step that is under way, in one piece, while the context is open."""
    return _noted(_by_units)


def runs_by_units() -> bool:
    """Whether that context is open."""
    return bool(_by_units)


def step_forward_only() -> AbstractContextManager[None]:
    """Say that steps are run to compare what they come to, while the context is open: nothing is optimized."""
    return _noted(_forward_only)


def runs_forward_only() -> bool:
    """Whether that context is open."""
    return bool(_forward_only)


def without_replicas() -> AbstractContextManager[None]:
    """Log while the context is open what other replicas may not: those that have no further batch to evaluate."""
    return _noted(_without_replicas)


def logs_without_replicas() -> bool:
    """Whether that context is open."""
    return bool(_without_replicas)
