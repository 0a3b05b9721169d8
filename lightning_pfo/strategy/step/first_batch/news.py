"""What a step does in a later batch that it has not done before: by that alone another batch may be another one."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from lightning_pfo.strategy.model.tracing.dividing.program import Counts
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch

MOST_NEWS = 4
"""So many batches are looked at in which something is left or logged that was not before, or is called as never before;
and so many whose loss is made in another way."""

_CHOICES = 3
"""So many batches are looked at of a loss that chooses among samples: each may be equal to one device's by chance."""


class News:
    """Remembers what a step has called, left and logged, and how it has made its loss."""

    def __init__(self) -> None:
        self._known: defaultdict[Source, set[Any]] = defaultdict(set)
        self._left: defaultdict[tuple[Source, bool], int] = defaultdict(lambda: MOST_NEWS)
        self._choices: Counter[tuple[Source, int]] = Counter()

    def of(self, of: StepOnBatch, outcome: dict[str, Any], units: Counts) -> tuple[Source, bool] | None:
        """The kind of what is new in a batch; None if nothing is.

        Args:
            of: The batch.
            outcome: What has come of it, on the last rank.
            units: How often units were called, where the step was traced anew.
        """
        way = outcome["way"].number
        places = {*outcome["changes"], *(name for name, *_ in outcome["logged"]), *([units] if units else ())}
        new = {*places, way} - self._known[of.source]
        self._known[of.source] |= new
        # ways of random layers are many, and must not keep others from being looked at
        return (of.source, new == {way}) if new else None

    def may_be_chance(self, of: StepOnBatch, outcome: dict[str, Any]) -> bool:
        """Whether the loss of a batch is worth a look though others of its kind were looked at; counts the batch."""
        if not outcome["way"].chooses:
            return False
        way = of.source, outcome["way"].number
        self._choices[way] += 1
        return self._choices[way] <= _CHOICES and len(self._choices) <= MOST_NEWS

    def are_to_be_looked_at(self, kind: tuple[Source, bool]) -> bool:
        """Whether news of this kind are still looked at; counts that they are."""
        if not self._left[kind]:
            return False
        self._left[kind] -= 1
        return True
