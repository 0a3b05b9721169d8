"""Whether a user's step is under way on this rank: there, nobody may wait for ranks that do not run the same code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_under_way: list[bool] = []


@contextmanager
def step_under_way(*, ends_here: bool) -> Iterator[None]:
    """Say that a step runs while the context is open.

    Args:
        ends_here: Whether it is run to its end, as on the last stage, and for real.
    """
    _under_way.append(ends_here)
    try:
        yield
    finally:
        _under_way.pop()


def within_step() -> bool:
    """Whether a step is under way."""
    return bool(_under_way)


def step_ends_here() -> bool:
    """Whether the step that is under way is run to its end here."""
    return bool(_under_way) and _under_way[-1]
