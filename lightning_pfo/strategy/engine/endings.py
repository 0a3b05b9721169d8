"""What ends a step although it is no error: KeyboardInterrupt and SystemExit, which a step may raise itself.

They end all ranks as errors do, at the end of the batch, so that nobody waits for the rank that raised them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class InterruptedAtOnce(KeyboardInterrupt):
    """Ends a run where it is: who asks for it, as by a second Ctrl-C, does not wait for the end of the batch."""

    def __init__(self) -> None:
        super().__init__("a second Ctrl-C")


class StepEndedError(Exception):
    """Stands for what a step has raised that is no error.

    Args:
        ending: What it has raised.
    """

    def __init__(self, ending: BaseException) -> None:
        super().__init__(ending)
        self.ending = ending


def as_error(raised: BaseException) -> Exception | None:
    """What a step raised as an error; None for what is none of its endings, such as what ends a stage's own step."""
    if isinstance(raised, InterruptedAtOnce):
        return None
    if isinstance(raised, (KeyboardInterrupt, SystemExit)):
        return StepEndedError(raised)
    return raised if isinstance(raised, Exception) else None


def ending_as_raised(run: Callable[P, T]) -> Callable[P, T]:
    """A function that runs steps on all ranks; what ended them on any is raised under its own name."""

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return run(*args, **kwargs)
        except StepEndedError as ended:
            raise ended.ending from ended.__cause__

    return call
