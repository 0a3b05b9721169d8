"""Which labels microbatches count by, where nothing is said: those that give what one device has.

Those that are not -100 are likeliest. Where they do not give it, others may, if they do so exactly: those that are no
padding or not masked, classes by their weights. Microbatches of a batch may have as many labels each, or losses that
hardly tell. So the batch is run once more with few labels in some of them, where others have no part already, and other
weights, lengths and masks, where these explain it as well; of gradients too, if losses say nothing then.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.batches.weights import Labels
from lightning_pfo.strategy.step.effects.fresh import anew
from lightning_pfo.strategy.step.first_batch.candidates import (
    labels_with_gaps,
    labels_without_gaps,
    take_labels_away,
    with_least,
)
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair
from lightning_pfo.strategy.step.first_batch.differences.slopes import Compared, gap
from lightning_pfo.strategy.step.first_batch.rehearsal import Rehearsal
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import StepOnBatch

_log = logging.getLogger(__name__)
HowFar = Callable[[Sequence[Pair], Sequence[float]], int]
"""How far from one device that is to which microbatches have come: beyond how many of some tolerances."""
Distance = Callable[[Sequence[Pair]], float]
"""The same by those that rounding explains; 0: by no more than that."""


@dataclass(frozen=True)
class _Tried:
    """What microbatches have come to, and what candidates for their weights give.

    Attributes:
        of: The batch.
        parts: The microbatches.
        pairs: What has come of them, on the last rank.
        weights: By each candidate, there.
        distances: How far from one device what each gives is; none if nobody knows.
        known: What is known of that by weights, which several candidates may give.
    """

    of: StepOnBatch
    parts: Microbatches
    pairs: Sequence[Pair]
    weights: Sequence[tuple[float, ...]] = ()
    distances: Sequence[float] = ()
    known: dict[tuple[float, ...], float] = field(default_factory=dict)

    @property
    def explains_nothing(self) -> bool:
        """Whether none of the candidates gives what one device has."""
        return bool(self.distances) and all(self.distances)

    @property
    def tells_nothing(self) -> bool:
        """Whether all of them give what is as near."""
        return len(set(self.distances)) == 1

    def weigh(self, candidate: int) -> None:
        """Weigh by one of them."""
        for pair in self.pairs:
            pair.parts.recorder.weights = self.weights[candidate]


class LabelChoice:
    """Weighs microbatches by labels where that gives what one device has.

    Args:
        runner: Runs the user's step.
        rehearsal: Runs batches that are compared.
        divided: Whether layers are divided over replicas.
    """

    def __init__(self, runner: StepOnStages, rehearsal: Rehearsal, *, divided: bool) -> None:
        self._engine, self._batching, self._rules = runner.engine, runner.batching, runner.rules
        self._owner = runner.owner
        self._rehearsal = rehearsal
        self._divided = divided

    def choose(
        self, of: StepOnBatch, parts: Microbatches, pairs: Sequence[Pair], how_far: HowFar, number: int = 0
    ) -> list[Pair]:
        """Choose weights; a collective call of all who run the batch.

        Args:
            of: The batch.
            parts: The microbatches that were run.
            pairs: What has come of them, on the last rank; it is weighed anew.
            how_far: How far from one device that is.
            number: That of a batch before which, or in which, others may have had wrong weights; 0: they had not.

        Returns:
            What else was run to find out, on the last rank.
        """
        rules, tell = self._rules, self._rehearsal.tell
        distance = _by(how_far, self._rehearsal.tolerances())
        before = rules.labels(of.source)
        shifts = self._batching.shifted_labels
        found = labels_with_gaps(parts.parts, rules.ignored, are_shifted=shifts) if pairs else []
        found = with_least([*filter(None, [before]), *found], parts.parts) if pairs else []
        told = [labels for each in tell(found) for labels in each]
        ignored = {labels.ignored for labels in told}
        # replicas may have found out by themselves, each by other samples
        known = tell((rules.knows_labels(of.source, ignored), before))
        is_known = all(is_known for is_known, _ in known)
        if self._batching.microbatch_weight != "auto" or not any(
            tell(bool(pairs) and (not is_known or distance(pairs) > 0))
        ):
            return []
        candidates = list(dict.fromkeys((*(labels for _, labels in known), *told, None)))
        tried = [self._tried(_Tried(of, parts, pairs), candidates, distance)]
        others, alike = list[Labels](), list[Labels]()
        if tried[0].explains_nothing:
            others = self._others_that_explain(chain(tried, self._half(of, parts)), distance)
        elif not is_known and of.kind != "predict":
            alike = self._others_that_explain(tried, distance)
        likely = candidates
        candidates = list(dict.fromkeys((*others, *likely, *alike)))
        if not is_known and candidates != [None]:
            tried += self._with_fewer(of, parts, candidates, distance)
            if not others and tried[-1].explains_nothing:  # such as labels, where lengths say how many there were
                others = self._others_that_explain(tried, distance)
                candidates = list(dict.fromkeys((*others, *likely)))
        tried = [self._tried(each, candidates, distance) for each in tried]
        if candidates == [None]:
            return []
        if len(tried) > 1 and of.kind == "train" and not self._divided and tried[1].tells_nothing:
            with self._rehearsal.silent(True):
                tried[1] = replace(tried[1], distances=self._distances_of_slopes(tried[1]))
        distances = [sum(each) for each in zip(*(each.distances for each in tried if each.distances), strict=True)]
        # what is less likely explains it, or does not
        distances = [a and (a if each in likely else math.inf) for a, each in zip(distances, candidates, strict=False)]
        best = self._best(tried, distances, how_far)
        for each in tried:
            each.weigh(best)
        is_other = candidates[best] != before
        is_news = is_other and not rules.has_chosen(of.source, candidates[best])
        tells = any(apart for apart, each in zip(distances, candidates, strict=False) if each in likely or others)
        if is_other or (tells and distances[best] == 0):
            rules.weigh_by(of.source, candidates[best], ignored)
        elif not is_known:
            as_good = zip(candidates, distances, strict=False)
            rules.watch(of.source, [labels for labels, apart in as_good if labels and apart == distances[best]])
        if is_news and self._engine.is_speaker:
            _log.log(*_told_of(of.kind, candidates[best], number, is_another=is_known))
        # where the batch itself tells, one with fewer need not be one that there is: of two masks one has changed
        is_told = any(tried[0].distances) and not tried[0].distances[best]
        return [pair for other in tried[1:] if not (is_told and other.explains_nothing) for pair in other.pairs]

    def _best(self, tried: Sequence[_Tried], distances: Sequence[float], how_far: HowFar) -> int:
        """The likeliest of candidates that are as far from one device; of those, the nearest by less than rounding.

        Rounding that explains much explains what is a mean over other things, too, as it is seldom as large as it may.
        """
        best = [index for index, each in enumerate(distances) if each == min(distances)]
        (finer, *_) = self._rehearsal.tell(self._rehearsal.finer_tolerances())
        if len(best) < 2 or not finer:
            return next(iter(best), 0)
        of_each = [self._distances(replace(each, known={}), best, _by(how_far, finer)) for each in tried]
        nearness = [sum(each) for each in zip(*filter(None, of_each), strict=True)]
        return min(zip(nearness, best, strict=False), default=(0, best[0]))[1]

    def _others_that_explain(self, ran: Iterable[_Tried], distance: Distance) -> list[Labels]:
        """Labels without -100 by which microbatches come to what one device has, in all that were run."""
        others: list[Labels] | None = None
        for each in ran:
            if others is None:
                batch, size = each.of.batch, each.of.parts.size
                found = labels_without_gaps(batch, self._owner, self._rules.ignored, size) if each.pairs else []
                found = with_least(found, each.parts.parts)
                others = list(dict.fromkeys(labels for told in self._rehearsal.tell(found) for labels in told))
            distances = self._tried(each, others, distance).distances
            others = [labels for labels, apart in zip(others, distances, strict=False) if not apart]
            if not others:
                break
        return others or []

    def _half(self, of: StepOnBatch, parts: Microbatches) -> Iterator[_Tried]:
        """Half of a batch, which tells that nothing explains it by chance."""
        half = of.parts[: self._batching.num_to_join(of.parts, len(parts) // 2)]
        if 1 < len(half) < len(parts):
            with self._rehearsal.silent(True):
                yield _Tried(of, half, self._rehearsal.pair(of, half, 0))

    def _with_fewer(
        self, of: StepOnBatch, parts: Microbatches, candidates: Sequence[Labels | None], distance: Distance
    ) -> list[_Tried]:
        """What candidates give for microbatches with other numbers of labels; none if they cannot have others."""
        labels = [each for each in candidates if each is not None]
        batch = anew(of.batch, copies=True)
        are_copies = _are_copies(labels, batch, of.batch)  # which an object of another class need not give
        of = replace(of, batch=batch, parts=self._batching.split(batch, len(of.parts)))
        parts = of.parts[: len(parts)]
        are_other = are_copies and take_labels_away(batch, parts.parts, labels)
        if not all(self._engine.all_gather(are_other, everywhere=self._rehearsal.everywhere)):
            return []
        with self._rehearsal.silent(True):
            ran = _Tried(of, parts, self._rehearsal.pair(of, parts, 0))
        return [self._tried(ran, candidates, distance)]

    def _tried(self, ran: _Tried, candidates: Sequence[Labels | None], distance: Distance) -> _Tried:
        """What candidates give for microbatches that were run."""
        parts = ran.parts
        weights = [self._rules.weights_by(labels, parts.parts, parts.sizes) for labels in candidates if ran.pairs]
        tried = replace(ran, weights=weights)
        return replace(tried, distances=self._distances(tried, range(len(candidates)), distance))

    def _distances(self, tried: _Tried, candidates: Iterable[int], distance: Distance) -> list[float]:
        """How far from one device what some candidates give is; none if nobody knows."""

        def by(candidate: int) -> float:
            tried.weigh(candidate)
            weights = tried.weights[candidate]
            if weights not in tried.known:
                tried.known[weights] = distance(tried.pairs)
            return tried.known[weights]

        return self._of_all([by(candidate) for candidate in candidates] if tried.pairs else [])

    def _distances_of_slopes(self, tried: _Tried) -> list[float]:
        """How far gradients are from those of one device."""
        found, tolerance = self._rehearsal.slopes(tried.of, tried.parts, 0), self._rehearsal.tolerance()
        if found is None:
            return []
        by_weights = [Compared(found.of_parts, found.of_all, weights, found.sizes) for weights in tried.weights]
        return self._of_all([gap([each], tolerance) for each in by_weights])

    def _of_all(self, distances: list[float]) -> list[float]:
        """Those of all replicas, as they have other samples."""
        told = list(filter(None, self._rehearsal.tell(distances)))
        return [sum(each) for each in zip(*told, strict=True)]


def _by(how_far: HowFar, tolerances: Sequence[float]) -> Distance:
    return lambda pairs: how_far(pairs, tolerances)


def _are_copies(labels: Sequence[Labels], batch: Any, of: Any) -> bool:
    ours, theirs = dict(leaves_of(batch)), dict(leaves_of(of))
    return all(ours.get(each.path) is not theirs.get(each.path, ours) for each in labels)


def _told_of(kind: str, labels: Labels | None, number: int, *, is_another: bool) -> tuple[int, str]:
    """What is said of other weights, and how urgently: batches before may have had those of others."""
    by = "samples" if labels is None else str(labels)
    if is_another:
        told = (
            f"Microbatches count by their {by} in {kind} steps with a loss that is made as this batch's is; others go "
            f"on as they were."
        )
        late = f" Batch {number}, and others before with such a loss, may have counted otherwise."
        return (logging.WARNING, told + late) if number else (logging.INFO, told)
    if not number:
        return logging.INFO, f"Microbatches count by their {by} in {kind} steps."
    how = "microbatch_weight='tokens'"
    if labels is not None and labels != Labels(labels.path, labels.are_shifted):
        how = "a function of a microbatch, microbatch_weight=..., that returns how much it counts"
    return logging.WARNING, (
        f"From batch {number} on microbatches count by their {by}, which gives the loss of one device here and was not "
        f"to be told from the first batch. If earlier batches had different numbers of them in their microbatches, "
        f"their losses were others: say it from the begin, by {how}."
    )
