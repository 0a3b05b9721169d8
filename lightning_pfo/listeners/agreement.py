"""Problems of one rank that end the run on all of them."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.events import InstructionSource


def check_together(source: InstructionSource, check: Callable[[], None]) -> None:
    """Run a check on every rank and raise what the first one finds on all; a collective call.

    A rank that raised alone would leave the others waiting for it.

    Args:
        source: The pipeline rank.
        check: Raises a `PfoError` if there is a problem.

    Raises:
        PfoError: What the first rank with a problem has raised.
    """
    problem: PfoError | None = None
    try:
        check()
    except PfoError as error:
        problem = error
    found = first_problem(source, problem)
    if found is not None:
        raise found[1]


def first_problem(source: InstructionSource, problem: PfoError | None) -> tuple[str, PfoError] | None:
    """Exchange what each rank has met; returns who has the first problem, and which; a collective call."""
    met = source.all_gather((name_of(source), problem), everywhere=True)
    return next((found for found in met if found[1] is not None), None)


def name_of(source: InstructionSource) -> str:
    """Which process of the run this is, for messages."""
    dp_rank, tp_rank = source.place
    parts = [f"replica {dp_rank}"] if dp_rank else []
    parts += [f"tensor-parallel rank {tp_rank}"] if tp_rank else []
    return " of ".join([f"rank {source.rank}", *parts])


def is_first(source: InstructionSource) -> bool:
    """Whether this process speaks for all of the run."""
    return (source.rank, *source.place) == (0, 0, 0)
