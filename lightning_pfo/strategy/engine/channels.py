"""Groups that transfers between stages go through: one for each direction between two ranks.

In an nccl communicator a rank's transfers form a queue, and each waits until its peer has come to it. In one queue for
all of a rank's transfers, a receive waits until some other rank has taken what was sent before. With four ranks and
eight microbatches interleaved orders lose up to 7 % of an iteration by it, under fast and slow plans; in queues by
direction they lose nothing (`benchmarks/rendezvous.py`: emulated, not tried on GPUs). With gloo no transfer waits for
another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch.distributed as dist

from lightning_pfo.strategy.parallel.groups import Groups, Wanted, global_rank

WITHOUT_QUEUES = frozenset({"gloo"})
"""Backends in which transfers do not wait for each other."""

Channels = Mapping[tuple[int, int], dist.ProcessGroup]
"""The group for transfers from a rank of the pipeline to another; the pipeline's own where there is none."""


def make_channels(placement: Sequence[int], group: dist.ProcessGroup | None, groups: Groups) -> Channels:
    """Make the groups between this rank and the ranks of neighbouring stages; a collective call of the world.

    Args:
        placement: Rank of every stage.
        group: The pipeline's process group; None is the world.
        groups: Makes groups.
    """
    if dist.get_backend(group) in WITHOUT_QUEUES:
        return {}
    own = dist.get_rank(group)
    neighbours = {(one, other) for one, other in pairwise(placement) if one != other and own in (one, other)}
    directions = sorted({*neighbours, *((other, one) for one, other in neighbours)})
    wanted = []
    for source, destination in directions:
        ranks = global_rank(group, source), global_rank(group, destination)
        wanted.append(Wanted(tuple(sorted(ranks)), use=f"from {ranks[0]} to {ranks[1]}"))
    return dict(zip(directions, groups.together(wanted), strict=True))
