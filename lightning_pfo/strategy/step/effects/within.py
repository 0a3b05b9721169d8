"""Whether a user's step is under way on this rank: there, nobody may wait for ranks that do not run the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way: list[bool] = []
_without_replicas: list[None] = []
_by_units: list[None] = []


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


@contextmanager
def step_by_units() -> Iterator[None]:
    """Say that all ranks run the step that is under way, in one piece, while the context is open."""
    _by_units.append(None)
    try:
        yield
    finally:
        _by_units.pop()


def runs_by_units() -> bool:
    """Whether that context is open."""
    return bool(_by_units)


@contextmanager
def without_replicas() -> Iterator[None]:
    """Log while the context is open what other replicas may not: those that have no further batch to evaluate."""
    _without_replicas.append(None)
    try:
        yield
    finally:
        _without_replicas.pop()


def logs_without_replicas() -> bool:
    """Whether that context is open."""
    return bool(_without_replicas)
