"""How many numbers of a batch no rule would explain, by one choice of weights for its microbatches after the other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_pfo.strategy.step.first_batch.differences.numbers import NumberCheck, Situation

_BY_WEIGHTS = ("mean", "mean over samples", "as the loss", "made of counts")
"""The rules by which numbers may be others with other weights."""


@dataclass
class Unexplained:
    """Counts them for choices of weights; nothing is learnt of it.

    A largest number, or a sum, is the same by any weights: for these rules are looked for once, not for each choice.

    Args:
        check: What is known of the numbers.
    """

    check: NumberCheck
    _by_any: list[tuple[Situation, float, dict[str, str]]] = field(default_factory=list)

    def number(self, situation: Situation, tolerance: float) -> int:
        """How many there are by the weights that microbatches have now."""
        if not self.check.differing(situation, tolerance):
            return 0
        with self.check.trial() as trial:
            trial.take(self._explained_by_any(situation, tolerance))
            differs = bool(trial.differing(situation, tolerance))
            return len(trial.find_rules([situation], tolerance, _BY_WEIGHTS)) if differs else 0

    def _explained_by_any(self, situation: Situation, tolerance: float) -> dict[str, str]:
        """Rules of numbers that are explained by them whatever the weights are."""
        for of, by, found in self._by_any:
            if of is situation and by == tolerance:
                return found
        with self.check.trial() as trial, _without_weights(situation):
            trial.find_rules([situation], tolerance)
        found = {place: names[0] for place, names in trial.open.items()}
        self._by_any.append((situation, tolerance, found))
        return found


@contextmanager
def _without_weights(situation: Situation) -> Iterator[None]:
    """What is put together by weights is no number while the context is open."""
    recorders = [pair.parts.recorder for pair in situation]
    before = [recorder.weights for recorder in recorders]
    for recorder in recorders:
        recorder.weights = (math.nan,) * len(recorder.sizes)
    try:
        yield
    finally:
        for recorder, weights in zip(recorders, before, strict=True):
            recorder.weights = weights
