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
    for found in source.all_gather(problem, everywhere=True):
        if found is not None:
            raise found
