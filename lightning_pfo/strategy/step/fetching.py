"""Steps that take a `dataloader_iter`, and fetch their batch themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_pfo.core.errors import ConfigurationError


def batch_of(args: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """The batch of a step, and its other arguments.

    A step that takes a `dataloader_iter` fetches its batch itself; here it is fetched once, and each microbatch's step
    gets an iterator over its part.
    """
    batch, *rest = args
    if not isinstance(batch, Iterator) or rest:
        return batch, rest
    batch, *rest = next(batch)
    return batch, [_FETCHED, *rest]


def loader_of(rest: list[Any]) -> int:
    """Which of several loaders the batch of an evaluation is of: what a step is given after the index of the batch."""
    given = [argument for argument in rest if argument is not _FETCHED]
    return int(given[1]) if len(given) > 1 else 0


_FETCHED = object()
"""Marks a batch that was fetched for a step that does so itself."""


def fetching(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step as a function of a batch, also if it takes a `dataloader_iter`."""

    def run(batch: Any, *rest: Any) -> Any:
        if rest[:1] == (_FETCHED,):
            return step(_once((batch, *rest[1:])))
        return step(batch, *rest)

    return run


def _once(batch: tuple[Any, ...]) -> Iterator[Any]:
    yield batch
    raise ConfigurationError(
        "A step on a pipeline runs once for each microbatch, so it fetches one batch from its dataloader_iter; it "
        "asks for more. Let the loader yield what belongs together as one batch."
    )
