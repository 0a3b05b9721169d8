"""What is done before the first batches of each kind of step: they are compared, and users are told of batch norms."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms, what_they_normalise
from lightning_pfo.strategy.model.tracing.dividing.program import Counts
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.first_batch.comparison import Comparison
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch


class FirstLooks:
    """Looks at the first batches.

    Args:
        runner: Runs the user's steps.
        check_loss: Whether batches are compared with their microbatches.
        compiled: Whether layers are compiled.
        divided: Whether layers are divided over replicas.
        deferred: Batch norms whose running statistics are those of batches.
    """

    def __init__(
        self,
        runner: StepOnStages,
        check_loss: bool,
        *,
        compiled: bool,
        divided: bool,
        deferred: DeferredBatchNorms | None,
    ) -> None:
        self._engine, self._owner = runner.engine, runner.owner
        self._comparison = Comparison(runner, compiled=compiled, divided=divided) if check_loss else None
        self._are_deferred = deferred is not None
        self._is_end_whole = runner.batching.joins_microbatches
        self._has_trained = False

    def look(self, of: StepOnBatch) -> None:
        """Look at a batch before it is run; a collective call, see `Comparison.check`."""
        if of.kind == "train" and not self._has_trained:
            self._has_trained = True
            if self._engine.is_speaker:
                self._tell(of)
        if self._comparison is not None and not of.phase:
            self._comparison.check(of)

    def divides(self, source: Source) -> bool:
        """Whether batches are divided: not those of an evaluation that was found to need all samples."""
        return self._comparison is None or source not in self._comparison.in_one_piece

    def finds_news(self, of: StepOnBatch, outcome: dict[str, Any], units: Counts) -> bool:
        """See `Comparison.finds_news`."""
        return self._comparison is not None and self._comparison.finds_news(of, outcome, units)

    def look_at_news(self, of: StepOnBatch) -> None:
        """See `Comparison.check_news`."""
        if self._comparison is not None:
            self._comparison.check_news(of)

    @property
    def learns_numbers(self) -> bool:
        """Whether `learn_numbers` does something."""
        return self._comparison is not None

    def learn_numbers(self, of: StepOnBatch, layers: Collection[str]) -> None:
        """See `Comparison.learn_numbers`."""
        if self._comparison is not None:
            self._comparison.learn_numbers(of, layers)

    def _tell(self, of: StepOnBatch) -> None:
        said = what_they_normalise(
            self._owner, of.parts.sizes, are_deferred=self._are_deferred, is_end_whole=self._is_end_whole
        )
        if said:
            warn_once(said)
