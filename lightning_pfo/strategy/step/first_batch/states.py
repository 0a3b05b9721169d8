"""Whether the loss of the second training batch, which finds what the first has left, is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lightning_pfo.strategy.step.first_batch.differences.losses import describe, differ
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair, are_other, how_other, losses_of
from lightning_pfo.strategy.step.first_batch.labels import LabelChoice
from lightning_pfo.strategy.step.first_batch.rehearsal import Rehearsal
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import StepOnBatch

_STATE = (
    "This step keeps something for the next batch, and each microbatch finds all of it: a state is divided where its "
    "tensors have a row for each sample. With num_microbatches=1 and schedule='gpipe' it is that of one device."
)


class StateCheck:
    """Compares the second batch, and divides what the first has left in rows where that makes the losses equal.

    Args:
        runner: Runs the user's step.
        rehearsal: Runs a batch forward only.
        labels: Chooses by which labels microbatches are weighed.
    """

    def __init__(self, runner: StepOnStages, rehearsal: Rehearsal, labels: LabelChoice) -> None:
        self._programs = runner.programs
        self._rehearsal = rehearsal
        self._labels = labels

    def said(self, of: StepOnBatch, number: int, name: str) -> str:
        """What to say of a loss that is another one than on one device; nothing if it is none; a collective call.

        Args:
            of: The batch.
            number: Which training batch it is.
            name: How it is told.
        """
        with self._rehearsal.aside():
            return self._said(of, partial(self._pairs, of, number), name)

    def _said(self, of: StepOnBatch, pairs_of: Callable[[], tuple[bool, list[Pair], bool]], name: str) -> str:
        with self._rehearsal.silent(True):
            is_known, pairs, is_equal = pairs_of()
            is_made_alike = not of.rows.can_be_divided() or self._are_made_alike(of)
            if not (is_equal and is_made_alike) and of.rows.divide():
                self._programs.forget()
                *_, is_equal_now = pairs_of()
                if is_equal_now and (is_made_alike or self._are_made_alike(of)):
                    return ""
                of.rows.give_up()
                self._programs.forget()
        if not is_known:
            pairs_of()  # says why
        tolerance = self._rehearsal.tolerance()
        losses = list(map(losses_of, pairs))
        if is_equal or not (losses and differ(losses, tolerance)):
            return ""  # another may be that of another replica
        return f"{describe(losses, len(of.parts), tolerance, name)} {_STATE}"

    def _are_made_alike(self, of: StepOnBatch) -> bool:
        """Whether losses of microbatches are made as that of the batch: a term may be small, or left out by a shape."""
        compared = self._rehearsal.slopes(of, of.parts, 0)
        return all(self._rehearsal.tell(compared is None or compared.of_parts.ways == compared.of_all.ways))

    def _pairs(self, of: StepOnBatch, number: int) -> tuple[bool, list[Pair], bool]:
        """Whether the batch ran, what its microbatches come to, on the last rank, and whether losses are equal."""
        run = self._rehearsal.both_ways(of)
        if run is None:
            return False, [], False
        parts, pairs, _ = run
        self._labels.choose(of, parts, pairs, how_other, number=number)

        def is_other() -> bool:
            return any(self._rehearsal.tell(are_other(pairs, tolerance=self._rehearsal.tolerance())))

        found = is_other()
        if found:
            self._rehearsal.draw_again(of, parts, pairs, None)
            found = is_other()
        return True, pairs, not found
