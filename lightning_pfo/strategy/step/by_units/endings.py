"""How a step ends that all ranks run unit by unit, and what is said of it."""

from __future__ import annotations

import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.groups import RanksApartError, meet


def meet_at_end(kind: str, hosts: dist.ProcessGroup | None, error: Exception | None) -> None:
    """Notice ranks that still call units; a collective call of those that hold a pipeline.

    Args:
        kind: Which step it was.
        hosts: The processes; see `Groups.hosts`.
        error: What went wrong on this rank.

    Raises:
        Exception: The error, where others have none and still wait for this rank.
        RanksApartError: On those.
    """
    if isinstance(error, RanksApartError):
        raise error
    try:
        meet(f"the end of a step ({kind})", hosts)
    except RanksApartError:
        if error is not None:
            raise error from None
        raise


def told_of(kind: str, refused: ConfigurationError) -> str:
    """What users are told of a kind of step that stages cannot run."""
    return (
        f"The {kind} step cannot be divided into stages; all ranks run it, on whole batches and layer by layer, each "
        f"waiting for the one that holds the layer. That is slower; the results are those of one device. Why: {refused}"
    )
