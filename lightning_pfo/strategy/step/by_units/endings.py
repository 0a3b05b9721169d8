"""How a step ends that all ranks run unit by unit."""

from __future__ import annotations

import torch.distributed as dist

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
