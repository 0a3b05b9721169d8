"""Batches of fewer samples than others, such as the last of an epoch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.splitting import Microbatches

_LEAST = 2


class ShortBatches:
    """Divides batches; a short one into microbatches of two samples or more, where others have as many.

    Batch norms of single values, and losses that compare samples, cannot do with one.

    Args:
        batching: How batches are divided.
    """

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._largest: defaultdict[str, int] = defaultdict(int)

    def split(self, kind: str, batch: Any, num_microbatches: int) -> Microbatches:
        """Divide a batch of a kind of step into microbatches; a short one into fewer than so many."""
        batching, found = self._batching, self._batching.split(batch, num_microbatches)
        self._largest[kind] = max(found.size, self._largest[kind])
        if len(found) == 1 or batching.split_batch is not None or min(found.sizes) >= _LEAST:
            return found
        others = max(self._largest[kind], *batching.expected(), 0)
        if found.size == others or others < _LEAST * num_microbatches:
            return found
        return batching.split(batch, max(1, found.size // _LEAST))
