"""Counts that a step keeps and logs: `self.seen += len(x); self.log("seen", self.seen)`.

Each microbatch goes on from what the batch has found, so none has the count of the batch. What the attribute comes to
has a rule of its own; where the number that is logged has always been the attribute's, it is so for the batch too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lightning_pfo.strategy.model.reach.places import Path
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.merge import Changes

Totals: TypeAlias = Callable[[str, Mapping[int, Any], Rules], Any]
"""Gives for a place what the batch has logged there, of what microbatches have; None where that is no count."""


def totals_in(changes: Sequence[Changes], of_batch: Changes, value_at: Callable[[Path], Any]) -> Totals:
    """The counts among what a step has changed.

    Args:
        changes: What each microbatch has changed.
        of_batch: What the batch has.
        value_at: Gives what was somewhere before.

    Returns:
        What knows them.
    """
    counts = {path: value for path, (_, value) in of_batch.items() if _is_count(value)}

    def total(place: str, logged: Mapping[int, Any], rules: Rules) -> Any:
        candidates = rules.candidates.get(place)
        if candidates is None:
            candidates = frozenset(counts)
        if not candidates:  # of most, at each batch
            return None
        before = {path: value_at(path) for path in candidates}
        left = {
            path
            for path in candidates
            if all(_is_same(changes[index].get(path, ("", before[path]))[1], value) for index, value in logged.items())
        }
        rules.candidates[place] = frozenset(left)
        # of what begins with 0 other rules tell as well, and a count may be equal to another number by chance there
        left = {path for path in left if _is_count(before[path]) and bool(before[path])}
        return counts.get(min(left, key=str)) if left else None

    return total


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.dtype.is_floating_point and value.dtype != torch.bool
    return type(value) is int


def _is_same(kept: Any, logged: Any) -> bool:
    return _is_count(kept) and math.isclose(float(kept), float(logged), rel_tol=1e-6)  # float32 rounds large ones
