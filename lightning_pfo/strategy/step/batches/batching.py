"""How the batches of a training are divided, and how much each microbatch counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.schedule import PipelineSchedule, loss_waits_for_all
from lightning_pfo.core.wording import shortened
from lightning_pfo.strategy.step.batches.reading import Known
from lightning_pfo.strategy.step.batches.side_by_side import SideBySide, side_by_side
from lightning_pfo.strategy.step.batches.splitting import (
    Microbatches,
    SplitBatch,
    batch_size_of,
    first_samples,
    size_or_one,
    split_batch,
)
from lightning_pfo.strategy.step.batches.weights import MicrobatchWeight, check_microbatch_weight, weights_of

LOSS_OVER = ("microbatch", "batch")
_LEAST = 2  # samples in microbatches of short batches


def _nobody_knows() -> None:
    pass


@dataclass(frozen=True)
class Batching:
    """How batches are divided into microbatches.

    Attributes:
        batch_dim: The dimension along which tensors have samples.
        split_batch: The user's own way of splitting.
        microbatch_weight: How much a microbatch counts in the loss of its batch; see `weights_of`.
        loss_over: `microbatch`: the loss of a batch is the weighted mean of its microbatches' losses. `batch`: it is
            computed once, of what all microbatches have come to.
        shifted_labels: Whether the first label of each sequence has no part in the loss.
        has_several_loaders: Says whether batches are put together from those of several loaders, part for part.
        expected: Says which sizes the loaders say that their batches have; see `reading`.
        known: What is known of batches, by earlier ones too, see there; None: nothing is remembered.
        label_leaves: Gives what may be labels in the present batch, as it was on the host; None: nobody knows.

    Raises:
        ConfigurationError: If a setting has another form.
    """

    batch_dim: int = 0
    split_batch: SplitBatch | None = None
    microbatch_weight: MicrobatchWeight = "auto"
    loss_over: str = "microbatch"
    shifted_labels: bool = False
    has_several_loaders: Callable[[], bool] = bool
    expected: Callable[[], Collection[int]] = tuple
    known: Known | None = None
    label_leaves: Callable[[], Mapping[str, Any] | None] = _nobody_knows

    def __post_init__(self) -> None:
        check_microbatch_weight(self.microbatch_weight)
        if self.loss_over not in LOSS_OVER:
            raise ConfigurationError(f"loss_over is {' or '.join(map(repr, LOSS_OVER))}; got {self.loss_over!r}.")
        if self.joins_microbatches and self.microbatch_weight not in ("auto", "samples"):
            raise ConfigurationError(
                f"With loss_over='batch' there is one loss of the whole batch, and none of microbatches to weigh; got "
                f"microbatch_weight={shortened(self.microbatch_weight)} too. Leave one of the two out."
            )
        if not isinstance(self.batch_dim, int) or self.batch_dim < 0:
            raise ConfigurationError(
                f"batch_dim is the dimension along which tensors have samples, 0 or more; got {self.batch_dim!r}. Use "
                f"batch_dim=1 for batches of shape (time, samples, ...)."
            )
        if self.split_batch is not None and not callable(self.split_batch):
            raise ConfigurationError(
                f"split_batch is a function that takes a batch and a number of microbatches, and returns them; got "
                f"{self.split_batch!r}."
            )

    @property
    def joins_microbatches(self) -> bool:
        """Whether what microbatches come to is joined before the loss."""
        return self.loss_over == "batch"

    def check_schedule(self, schedule: PipelineSchedule) -> None:
        """Check that a schedule suits the loss.

        Raises:
            ConfigurationError: If the loss needs all microbatches before the schedule has them all.
        """
        if self.joins_microbatches and not loss_waits_for_all(schedule):
            raise ConfigurationError(
                f"loss_over='batch' needs all forwards before the first backward, since the loss is that of the whole "
                f"batch; schedule={schedule.name!r} goes backward earlier. Use schedule='gpipe', or 'looped_bfs' with "
                f"several stages per rank."
            )

    def split(self, batch: Any, num_microbatches: int) -> Microbatches:
        """Divide a batch into microbatches; fewer, if it has fewer samples."""
        apart = self._side_by_side(batch)
        if apart is not None:
            return apart.split(num_microbatches)
        return split_batch(
            batch,
            num_microbatches,
            batch_dim=self.batch_dim,
            split=self.split_batch,
            expected=self.expected(),
            known=self.known,
        )

    def _side_by_side(self, batch: Any) -> SideBySide | None:
        if self.split_batch is not None or not self.has_several_loaders():
            return None
        return side_by_side(batch, self.batch_dim)

    def size_of(self, batch: Any, *, is_divided: bool) -> int:
        """Number of samples of a batch to train on; 1 if nobody can tell and it need not be divided."""
        if self.split_batch is not None:
            return split_batch(batch, 1, batch_dim=self.batch_dim, expected=self.expected()).size
        apart = self._side_by_side(batch)
        if apart is not None:
            return apart.size
        return (batch_size_of if is_divided else size_or_one)(batch, self.batch_dim, self.expected(), self.known)

    def evaluation_size_of(self, batch: Any) -> int | None:
        """Number of samples of a batch that is only run forward; 1: it need not be divided; None: it is not known."""
        if self.split_batch is not None:
            return None
        return size_or_one(batch, self.batch_dim, self.expected(), self.known)

    def num_to_join(self, microbatches: Microbatches, wanted: int) -> int:
        """How many of the first microbatches can be one batch, where so many are wanted.

        The user's own way of splitting does not tell which samples they have, so there it is all.
        """
        return wanted if self.split_batch is None else len(microbatches)

    def first_parts(self, batch: Any, microbatches: Microbatches, number: int) -> Any:
        """The samples of the first microbatches, as one batch; of as many as `num_to_join` says."""
        if number == len(microbatches):
            return batch
        apart = self._side_by_side(batch)
        if apart is not None:
            return apart.first(sum(microbatches.sizes[:number]))
        return first_samples(batch, sum(microbatches.sizes[:number]), self.batch_dim, self.expected(), self.known)

    def weights(self, microbatches: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...]:
        """How much each microbatch counts."""
        return weights_of(microbatches, sizes, self.microbatch_weight, shifted_labels=self.shifted_labels)


DEFAULT_BATCHING = Batching()


class ShortBatches:
    """Divides batches; one of fewer samples than others into microbatches of two or more, where others have as many.

    Batch norms of single values, and losses that compare samples, cannot do with one.

    Args:
        batching: How batches are divided.
    """

    def __init__(self, batching: Batching) -> None:
        self._batching = batching
        self._largest: defaultdict[str, int] = defaultdict(int)

    def split(self, kind: str, batch: Any, num_microbatches: int) -> Microbatches:
        """Divide a batch of a kind of step into microbatches; a short one into fewer than so many."""
        found = self._batching.split(batch, num_microbatches)
        self._largest[kind] = largest = max(found.size, self._largest[kind])
        is_short = found.size < largest and largest >= _LEAST * num_microbatches
        if len(found) == 1 or not is_short or min(found.sizes) >= _LEAST or self._batching.split_batch is not None:
            return found
        return self._batching.split(batch, max(1, found.size // _LEAST))
