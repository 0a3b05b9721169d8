"""Noticing ranks that are at different places, before they wait for each other for ever.

Ranks of a pipeline do the same things in the same order. A rank that leaves its loop early, or calls something alone,
comes to another meeting than the others: then all of them raise an error that names the places.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.parallel.groups import spread

_MOST_VOTES = 3


class RanksApartError(PfoError, RuntimeError):
    """Ranks that do everything together are at different places."""


def meet(what: str, group: dist.ProcessGroup | None, votes: Sequence[bool] = ()) -> list[bool]:
    """Say what comes next; a collective call of processes that do it together.

    Args:
        what: What comes next, for people.
        group: The processes, for tensors on the CPU.
        votes: Up to three questions, each answered with yes if any process says so.

    Returns:
        The answers.

    Raises:
        RanksApartError: On every rank, if another one comes to something else.
    """
    if dist.get_world_size(group) == 1:
        return list(votes)
    code = zlib.crc32(what.encode())
    unasked = [False] * (_MOST_VOTES - len(votes))  # of one size everywhere
    said = torch.tensor([code, -code, *votes, *unasked], dtype=torch.int64)
    largest, smallest, *answers = spread(said, torch.maximum, group).tolist()
    if largest == -smallest:
        return list(map(bool, answers[: len(votes)]))
    places: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(places, what, group=group)
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        ranks[place].append(rank)
    found = "; ".join(f"rank {', '.join(map(str, some))}: {place}" for place, some in ranks.items())
    raise RanksApartError(
        f"The ranks of a pipeline do everything together, but they are at different places: {found}. Decide alike on "
        f"every rank what ends a loop (StopIteration, returning -1), and call what all take part in on all of them, "
        f"not on the main process only."
    )
