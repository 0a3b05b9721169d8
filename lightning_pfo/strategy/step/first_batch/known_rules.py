"""What is known of what steps leave: rules of their values, and what their losses are means over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any

from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.batches.weights import (
    IGNORED_LABEL,
    NOT_FINITE,
    Labels,
    are_integers,
    has_gaps,
    have_gaps,
    is_divided_by_items,
    label_leaves,
    may_be_mask,
    may_be_targets,
    shares_of,
)
from lightning_pfo.strategy.step.effects.left import learn
from lightning_pfo.strategy.step.first_batch.candidates import labels_with_gaps
from lightning_pfo.strategy.step.gradients import WayMade
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch, StepRun
from lightning_pfo.strategy.step.programs import Programs

_MOST_WATCHED = 8  # in each batch one waits for their numbers
_MOST_EVER = 16
"""So many are watched of a kind of step: where each batch ends with another class, each would be compared."""


class KnownRules:
    """Rules of the values that each kind of step leaves with the batches of each loader, and weights of microbatches.

    Args:
        programs: Traces steps.
        batching: How batches are divided.
    """

    def __init__(self, programs: Programs, batching: Batching) -> None:
        self._programs = programs
        self._batching = batching
        self._rules: dict[Source, Rules] = {}
        self._labels: dict[Source, Labels | None] = {}
        self._of_ways: dict[tuple[Source, int], Labels | None] = {}
        self._was_found: set[Source] = set()
        self._refuted: defaultdict[Source, set[float]] = defaultdict(set)
        self._told: defaultdict[Source, set[Labels]] = defaultdict(set)
        self._watched: defaultdict[Source, set[Labels]] = defaultdict(set)
        self._none: set[tuple[Source, Labels]] = set()
        self.ways: set[int] = set()
        """How losses of training steps were made so far, see `way_of`."""
        self.ignored: set[int] = {IGNORED_LABEL}
        """Labels that had no part in them."""

    def of(self, source: Source) -> Rules:
        """What is known of what a kind of step leaves with the batches of a loader."""
        return self._rules.setdefault(source, Rules())

    def labels(self, source: Source, way: int = 0) -> Labels | None:
        """The labels that losses and numbers were found to be means over; None: none, or nobody knows yet.

        Args:
            source: The step and the loader.
            way: How the loss is made, see `way_of`; a step may have several. 0: as in the last batch that told.
        """
        is_told = source in self._was_found  # by this batch
        return self._labels.get(source) if is_told else self._of_ways.get((source, way), self._labels.get(source))

    def ran(self, source: Source, made: WayMade) -> None:
        """Keep in mind what a batch has told of losses that are made as its own."""
        way = made.number
        self.ignored |= made.ignored
        if way:
            self.ways.add(way)
        if way and source in self._labels and (source in self._was_found or (source, way) not in self._of_ways):
            self._of_ways[source, way] = self._labels[source]
        self._was_found.discard(source)

    def has_chosen(self, source: Source, labels: Labels | None) -> bool:
        """Whether some losses of a step are known to be means over these labels; None: over samples."""
        return any(of == source and chosen == labels for (of, _), chosen in self._of_ways.items())

    def knows_labels(self, source: Source, ignored: Collection[float]) -> bool:
        """Whether somebody has found out if losses and numbers are means over labels or over samples.

        Args:
            source: The step and the loader.
            ignored: Labels of a batch that may have no part: if they are means over samples, were all of these tried?
        """
        is_known = source in self._labels
        return is_known and (self._labels[source] is not None or self._refuted[source].issuperset(ignored))

    def asks_for_labels(self, source: Source) -> bool:
        """Whether nobody knows yet if numbers are means over labels or over samples, where that is to be found out."""
        batching = self._batching
        is_open = batching.microbatch_weight in ("auto", "samples") and not batching.joins_microbatches
        return is_open and (self._labels.get(source) is None or bool(self._untold_of(source)))

    def _untold_of(self, source: Source) -> set[int]:
        """Labels that may have no part in losses or numbers that nobody knows so far to be means over others."""
        if source not in self._labels:
            return self.ignored
        known = self._labels[source]
        if known is None:  # none of those that batches had so far
            return self.ignored - self._refuted[source]
        has_no_padding_yet = known.class_weights and known.ignored == IGNORED_LABEL
        return self.ignored - {IGNORED_LABEL} if has_no_padding_yet else set()

    def telling_labels(self, of: StepOnBatch) -> set[tuple[str, float]]:
        """Where a batch has labels, and which have no part, that can tell if numbers are means over them.

        None where that is known.
        """
        batching, parts = self._batching, of.parts
        if len(parts) == 1 or not self.asks_for_labels(of.source):
            return set()
        leaves = batching.label_leaves()
        if leaves is None:
            leaves = label_leaves(of.batch, waits=of.kind != "train")
        ignored = self._untold_of(of.source)
        others = set[Labels]()
        if self._labels.get(of.source) is None:
            others = (self._others_in(leaves) | self._watched[of.source]) - self._told[of.source]
        has_some = have_gaps((leaf for leaf in leaves.values() if not may_be_targets(leaf)), ignored)
        if not others and not has_some:
            return set()
        of_samples = shares_of(parts.sizes, parts.sizes)
        shifts = batching.shifted_labels
        found = [*others, *(labels_with_gaps(parts.parts, ignored, are_shifted=shifts) if has_some else ())]
        unequal = {labels for labels in found if self.weights_by(labels, parts.parts, parts.sizes) != of_samples}
        self._told[of.source] |= others & unequal  # once: nobody has said that they have no part
        return {(labels.path, labels.ignored) for labels in unequal}

    def _others_in(self, leaves: Mapping[str, Any]) -> set[Labels]:
        """What else may have no part: 0 of masks, -1, and targets that are not there."""
        zeros = {Labels(path, False, 0.0) for path, leaf in leaves.items() if may_be_mask(path, leaf)}
        negative = {Labels(path, False, -1.0) for path, leaf in leaves.items() if are_integers(leaf)}
        missing = {Labels(path, False, NOT_FINITE) for path, leaf in leaves.items() if may_be_targets(leaf)}
        return {labels for labels in zeros | negative | missing if has_gaps(leaves[labels.path], labels.ignored)}

    def watch(self, source: Source, labels: Iterable[Labels]) -> None:
        """Let the first batch tell of which microbatches have other numbers of some: they may count by these."""
        watched = self._watched[source]
        watched.update(islice(labels, min(_MOST_WATCHED, _MOST_EVER - len(watched))))

    def asks_for_none(self, source: Source) -> bool:
        """Whether nobody knows how a microbatch without any of the labels counts that losses are means over."""
        known = self._labels.get(source)
        return known is not None and not known.at_least and (source, known) not in self._none

    def tells_of_none(self, of: StepOnBatch) -> bool:
        """Whether a batch has such a microbatch, and others that have some."""
        known = self._labels.get(of.source)
        if known is None or not self.asks_for_none(of.source) or len(of.parts) == 1:
            return False
        counts = known.counts(of.parts.parts)
        return counts is not None and min(counts) < 1 <= max(counts)

    def note_none(self, source: Source) -> None:
        """Keep in mind that a batch with such a microbatch was compared."""
        if (known := self._labels.get(source)) is not None:
            self._none.add((source, known))

    def weigh_by(self, source: Source, labels: Labels | None, ignored: Iterable[float] = ()) -> None:
        """Let microbatches count by their labels from now on.

        Args:
            source: The step and the loader.
            labels: The labels; None: by what was said.
            ignored: Labels without a part that the batch has, by which it was told.
        """
        self._labels[source] = labels
        self._refuted[source].update(ignored)
        self._was_found.add(source)

    def weights(self, source: Source, parts: Sequence[Any], sizes: Sequence[int], way: int = 0) -> tuple[float, ...]:
        """How much each microbatch counts in the loss of its batch, and in numbers that are logged; see `labels`."""
        return self.weights_by(self.labels(source, way), parts, sizes)

    def weights_by(self, labels: Labels | None, parts: Sequence[Any], sizes: Sequence[int]) -> tuple[float, ...]:
        """How much they count by these labels; None, or where a batch has none of them: by what was said."""
        if labels is None or is_divided_by_items(parts[0]) or (counts := labels.counts(parts)) is None:
            return self._batching.weights(parts, sizes)
        return labels.shares(counts, sizes)

    @contextmanager
    def looking(self, of: StepOnBatch, run: StepRun, seed: int) -> Iterator[Rules]:
        """Compare what a step has left with traces of it, where rules are asked while the context is open.

        Args:
            of: The step.
            run: What has come of it.
            seed: That of the whole run.
        """
        rules, seeds = self.of(of.source), (seed, *of.seed, 0)
        batching, parts = self._batching, of.parts

        def look() -> None:
            both = Microbatches((batching.first_parts(of.batch, parts, 2),), (sum(parts.sizes[:2]),))
            left_by = partial(self._programs.left_by, seed=seeds, train=run.train)
            small, large = (left_by(partial(of.of_part, each, 0)) for each in (parts, both))
            if small is not None and large is not None:
                # what zeros come to may be what layers come to by chance, such as how many labels are 0
                learn(
                    rules,
                    run.left(0),
                    run.left(1),
                    small,
                    large,
                    left_by(partial(of.of_part, parts, 1), on_zeros=False),
                )

        # the user's own way of splitting does not tell which samples the first microbatches have
        is_told = not batching.joins_microbatches and len(parts) > 1 and batching.split_batch is None
        with rules.comparing(look if is_told else None, parts.sizes[0]):
            yield rules
