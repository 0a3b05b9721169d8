"""What is looked at on the first batches, do losses and numbers suit microbatches, and now and then of a later one."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.dividing.program import Counts
from lightning_pfo.strategy.step.batches.notices import trial
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.batches.weights import Labels
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.first_batch.differences import slopes
from lightning_pfo.strategy.step.first_batch.differences.losses import (
    apart,
    describe,
    differ,
    no_weights_explain,
)
from lightning_pfo.strategy.step.first_batch.differences.numbers import (
    NumberCheck,
    describe_changed,
    describe_in_evaluation,
)
from lightning_pfo.strategy.step.first_batch.differences.numbers import describe as describe_numbers
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair, how_other, losses_of
from lightning_pfo.strategy.step.first_batch.differences.unexplained import Unexplained
from lightning_pfo.strategy.step.first_batch.labels import LabelChoice
from lightning_pfo.strategy.step.first_batch.news import MOST_NEWS, News
from lightning_pfo.strategy.step.first_batch.rehearsal import EXTRA_DRAWS, Rehearsal
from lightning_pfo.strategy.step.first_batch.states import StateCheck
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import Numbers, Source, StepOnBatch, StepRun
from lightning_pfo.strategy.step.programs import Whole
from lightning_pfo.strategy.step.values import ValueExchange

_log = logging.getLogger(__name__)
T = TypeVar("T")
_TRIES, _TRIES_OF_EVALUATIONS = 3, 8
"""So many batches are looked at, where the first does not tell all."""
_AGAIN = frozenset(4**power for power in range(1, 16))
"""Numbers of the batches that are compared again: 4, 16, 64, 256 and so on."""
_FEW = 2
"""So many microbatches are compared in the fourth training batch: with all, it might take more memory than training.

All are where it has what none before had, as labels with gaps: others may have these.
"""
_SECOND = 2
"""That in which a step finds what it has left, as the state of a recurrent network."""


_NO_NUMBER = (
    "The loss of a batch is one number; here it has the shape {shape}, and is a number only of microbatches of a "
    "single sample. Return its mean over samples: loss.mean()."
)


class _Said(NamedTuple):
    """What is to be said of a batch."""

    is_error: bool
    is_of_loss: bool
    text: str
    in_one_piece: bool = False  # so that an evaluation comes to what one device does


class Comparison:
    """Compares what a batch comes to by microbatches and in one piece: losses and numbers; see the checks of these.

    Args:
        runner: Runs the user's step.
        compiled: Whether layers are compiled; here they are not, since a second batch size would compile them anew.
        divided: Whether layers are divided over replicas, which run them together then.

    Attributes:
        in_one_piece: Evaluations that come to what one device does where batches are not divided only.
    """

    def __init__(self, runner: StepOnStages, *, compiled: bool, divided: bool) -> None:
        self.in_one_piece: set[Source] = set()
        self._runner = runner
        self._engine, self._owner = runner.engine, runner.owner
        self._divided = divided
        self._rehearsal = Rehearsal(runner, compiled=compiled)
        self._labels = LabelChoice(runner, self._rehearsal, divided=divided)
        self._states = StateCheck(runner, self._rehearsal, self._labels)
        self._tries: dict[Source, int] = {}
        self._number: Counter[Source] = Counter()
        self._untold: set[Source] = set()
        self._number_trained = 0
        self._trained_before: Counter[Source] = Counter()
        self._asked: defaultdict[Source, dict[tuple[str, float], int]] = defaultdict(dict)
        self._looks_later = True
        self._leaves_something = runner.aggregates  # what their `compute` says in a step
        self._numbers: dict[Source, NumberCheck] = {}
        self._is_compared = False
        self._is_telling = False
        self._has_run = False
        self._are_slopes_known = False
        self._ways: defaultdict[Source, int] = defaultdict(lambda: 1)
        self._news = News()

    def check(self, first: StepOnBatch) -> None:
        """Compare for one batch, if it is one of the first of its kind and loader.

        A collective call of the pipeline, for training steps of all processes.

        Raises:
            ConfigurationError: On every rank, if the loss of the batch is no mean of the microbatches' losses, weighted
                or not. If it is a weighted mean, or nearly the mean, there is a warning.
        """
        kind, source = first.kind, first.source
        self._number_trained += kind == "train"
        self._number[source] += 1
        is_late = not self._tries.setdefault(source, _TRIES if kind == "train" else _TRIES_OF_EVALUATIONS)
        telling, tells_of_none = self._telling(first)
        self._is_telling = bool(telling) or tells_of_none
        if is_late and self._is_again_due(first):
            self._tries[source] = 1
        is_second = kind == "train" and self._number_trained == _SECOND
        if is_second and self._leaves_something and self._looks_later and self._are_alike(first):
            self._check_state(first)
        is_due = bool(self._tries[source])
        if is_due:
            self._trained_before[source] = self._number_trained
        self._is_compared = is_due or self._is_telling
        if not self._is_compared:
            return
        self._tries[source] = max(self._tries[source] - 1, 0)
        everywhere = self._divided or (kind == "train" and is_due and self._are_alike(first))
        self._compare_now(first, everywhere=everywhere, is_late=is_late)
        if self._is_telling:
            self._asked[source] |= dict.fromkeys(telling, self._number_trained)
            if tells_of_none:
                self._runner.rules.note_none(source)
            if self._runner.batching.microbatch_weight != "auto":  # nothing is chosen, so once will do
                self._runner.rules.weigh_by(source, None, self._runner.rules.ignored)

    def _is_again_due(self, of: StepOnBatch) -> bool:
        """Whether losses and numbers of a step may be others by now, or there was nothing to tell by."""
        source, number = of.source, self._number[of.source]
        if source[0] == "train":
            is_later = self._looks_later and not self._runner.batching.joins_microbatches
            return number in _AGAIN and (is_later or source in self._untold)
        ways = 0 if self._divided else min(len(self._runner.rules.ways), MOST_NEWS)  # of random layers there are many
        before, self._ways[source] = self._ways[source], ways
        has_learnt = self._number_trained > 2 * self._trained_before[source]  # what it found may have been by chance
        finds_rows = number == _SECOND and not self._divided and of.rows.can_be_divided()
        return ways > before or number in _AGAIN or finds_rows or has_learnt

    def _are_alike(self, of: StepOnBatch) -> bool:
        """Whether replicas can run a batch together: all have as many microbatches, and several."""
        numbers = set(self._engine.all_gather(len(of.parts), everywhere=True))
        return len(numbers) == 1 and numbers != {1}

    def _telling(self, of: StepOnBatch) -> tuple[set[tuple[str, float]], bool]:
        """What a batch can tell now; what those of all replicas can, where layers are divided.

        Returns:
            Labels that may tell what they count. They may again what they did not before: with untrained layers losses
            may be all the same. And whether it can tell how a microbatch without labels counts.
        """
        rules, source, is_training = self._runner.rules, of.source, of.kind == "train"
        asked, number = self._asked[source], self._number_trained
        is_due = not is_training or number >= 2 * max(asked.values(), default=0)
        telling = rules.telling_labels(of) if is_due else set()
        tells_of_none = rules.tells_of_none(of)
        if self._divided and ((is_due and rules.asks_for_labels(source)) or rules.asks_for_none(source)):
            everyone = self._engine.all_gather((telling, tells_of_none, len(of.parts)), everywhere=True)
            of_each, of_none, numbers = zip(*everyone, strict=True)
            are_alike = len(set(numbers)) == 1
            telling, tells_of_none = set().union(*of_each) if are_alike else set(), are_alike and any(of_none)
        return {each for each in telling if is_training or asked.get(each, -1) < number}, tells_of_none

    def finds_news(self, of: StepOnBatch, outcome: dict[str, Any], units: Counts) -> bool:
        """Whether a batch that was not compared is to be: it has called, left or logged what none has before.

        Or its loss is made in another way.

        Args:
            of: The batch.
            outcome: What has come of it, on the last rank.
            units: How often units were called, where the step was traced anew.
        """
        news = self._news.of(of, outcome, units)
        is_one = of.phase or of.by_units or len(of.parts) == 1
        is_one = is_one or (self._runner.batching.joins_microbatches and of.kind != "train")
        may_be_chance = self._news.may_be_chance(of, outcome) and self._looks_later
        if self._is_compared or is_one:
            return False
        return may_be_chance or (news is not None and self._news.are_to_be_looked_at(news))

    def check_news(self, of: StepOnBatch) -> None:
        """Compare a batch that was run already; a collective call of the pipeline, with divided layers of all."""
        self._has_run = True
        try:
            self._compare_now(of, everywhere=self._divided, is_late=True)
        finally:
            self._has_run = False

    def learn_numbers(self, of: StepOnBatch, layers: Collection[str]) -> None:
        """Look at numbers of layers that have grown in a batch, and did not where layers were in evaluation mode.

        A collective call of the pipeline, with divided layers of all.

        Args:
            of: The batch.
            layers: Such layers of this rank, by name.
        """
        rehearsal, watch = self._rehearsal, self._runner.layers
        rehearsal.everywhere = self._divided
        rehearsal.in_training = set().union(*self._engine.all_gather(set(layers), everywhere=self._divided))
        if not rehearsal.in_training:
            return
        try:
            with rehearsal.aside(), rehearsal.silent(True):
                run = rehearsal.both_ways(of)
        finally:
            rehearsal.in_training = ()
        if run is not None:
            watch.learn(*run.grown, len(run.parts))
        of_all = self._engine.all_gather(list(watch.means), everywhere=self._divided)
        watch.share({place for places in of_all for place in places})

    def _compare_now(self, first: StepOnBatch, *, everywhere: bool, is_late: bool) -> None:
        if everywhere or first.kind != "train" or not self._runner.has_replicas:
            if everywhere:
                self._agree()
            self._compare_by(first, everywhere=everywhere, is_late=is_late)
            return
        # one replica alone does so: when all compare together, all have to agree on
        agreed = dict(self._tries), set(self._untold), self._looks_later, self._leaves_something
        try:
            self._compare_by(first, everywhere=False, is_late=is_late)
        finally:
            self._tries, self._untold, self._looks_later, self._leaves_something = agreed

    def _agree(self) -> None:
        """Replicas that compare together do so in the same way, whatever one has learnt that compared alone."""
        rehearsal = self._rehearsal
        mine = rehearsal.evaluates, not rehearsal.is_narrow, not self._runner.differentiates, self._are_slopes_known
        everyone = self._engine.all_gather(mine, everywhere=True)
        rehearsal.evaluates, is_precise, stays_without, self._are_slopes_known = map(all, zip(*everyone, strict=True))
        rehearsal.is_narrow = not is_precise
        self._runner.differentiates = not stays_without

    def _compare_by(self, first: StepOnBatch, *, everywhere: bool, is_late: bool) -> None:
        engine, kind, source = self._engine, first.kind, first.source
        self._rehearsal.everywhere = everywhere
        said: list[_Said] = []
        if len(first.parts) > 1:
            with self._rehearsal.aside():
                said = self._compare(first, is_late=is_late)
            if self._rehearsal.loss_shape:
                said.append(_Said(True, True, _NO_NUMBER.format(shape=self._rehearsal.loss_shape)))
        numbers = self._numbers.get(source)
        state = (False, False) if numbers is None else (bool(numbers.open), bool(numbers.untold))
        layers = self._runner.layers
        everyone = engine.all_gather((said, state, list(layers.means)), everywhere=self._rehearsal.everywhere)
        layers.share({place for *_, places in everyone for place in places})
        are_open, are_untold = (any(each) for each in zip(*(state for _, state, _ in everyone), strict=True))
        if not (are_open or are_untold):
            self._tries[source] = min(self._tries[source], self._leaves_something and self._number[source] < _SECOND)
        (self._untold.add if are_untold else self._untold.discard)(source)
        if any(verdict.in_one_piece for verdicts, *_ in everyone for verdict in verdicts):
            self.in_one_piece.add(source)
        is_loss_told = not self._looks_later
        for verdict in sorted({verdict for verdicts, *_ in everyone for verdict in verdicts}, reverse=True):
            if verdict.is_error and not is_late:
                raise ConfigurationError(verdict.text)
            self._looks_later = self._looks_later and not (verdict.is_of_loss and kind == "train")
            if engine.is_speaker and not (verdict.is_of_loss and is_loss_told):
                _log.warning(verdict.text)
            is_loss_told = is_loss_told or verdict.is_of_loss  # of several replicas one will do

    def _check_state(self, of: StepOnBatch) -> None:
        """Compare the loss of the second training batch, which finds what the first has left; warn if it is another."""
        engine = self._engine
        if self._runner.batching.joins_microbatches:
            return
        self._agree()
        self._rehearsal.everywhere = True
        said = self._states.said(of, self._number_trained, self._name_of(of))
        found = sorted({text for text in engine.all_gather(said, everywhere=True) if text})
        self._looks_later = not found
        if found and engine.is_speaker:
            _log.warning(found[0])

    def _changed(self, check: NumberCheck, of: StepOnBatch, weighed_by: Labels | None) -> list[str]:
        """What to say of numbers that are put together otherwise than in earlier batches; nothing by new weights."""
        is_known = self._runner.rules.labels(of.source) == weighed_by  # what was alike before is so by both
        return [describe_changed(check.changed)] if check.changed and is_known else []

    def _compare(self, first: StepOnBatch, *, is_late: bool) -> list[_Said]:
        """What to say; nothing on all ranks but the last."""
        batching, num_microbatches = self._runner.batching, len(first.parts)
        is_training = first.kind == "train"
        whole = None
        if batching.joins_microbatches:
            if not is_training:
                return []
            whole = Whole(first.batch, lambda: first.step(first.batch, *first.rest), first.parts.sizes)
        by_parts = self._rehearsal.by_parts(first, whole)
        most = 0
        mine = bool(self._rehearsal.grown), self._is_telling
        everyone = self._engine.all_gather(mine, everywhere=self._rehearsal.everywhere)
        counts, is_telling = map(any, zip(*everyone, strict=True))
        is_due = is_training or counts or self._number[first.source] == 1  # rows, and what metrics are told, once
        if by_parts and whole is None and (self._is_unsure(first, by_parts) or is_due):
            is_soon = is_training and is_late and not self._has_run and self._number[first.source] == min(_AGAIN)
            most = _FEW if is_soon and not is_telling else self._rehearsal.most()
        if whole is not None:  # the end of the step has all of the batch in any case
            most = num_microbatches * bool(by_parts)
        run = self._rehearsal.in_one_piece(first, by_parts, most, whole)
        if run is None:
            return []
        parts, pairs, grown = run
        if whole is None:
            self._runner.layers.learn(*grown, len(parts))
        tolerance = self._rehearsal.tolerance()
        check, others = None, list[Pair]()
        weighed_by = self._runner.rules.labels(first.source)
        if whole is None:
            check = self._numbers.setdefault(first.source, NumberCheck(self._runner.rules.of(first.source)))
            how_far = how_other if is_training else partial(_how_many_unexplained, Unexplained(check))
            is_again = self._runner.has_replicas if self._has_run else is_late and self._number_trained in _AGAIN
            number = self._number_trained if is_training and is_again else 0
            others = self._labels.choose(first, parts, pairs, how_far, number)
        losses = [losses_of(pair) for pair in pairs] if is_training else []
        is_other = bool(losses) and differ(losses, tolerance)
        if check is not None:
            is_other = is_other or (bool(pairs) and self._differ(check, pairs, tolerance))
        if any(self._rehearsal.tell(is_other)):
            self._rehearsal.draw_again(first, parts, pairs, whole)
        said: list[_Said] = []
        losses = [losses_of(pair) for pair in pairs] if is_training else []
        is_error = no_weights_explain(losses, tolerance)
        if any(self._rehearsal.tell(is_error)):
            is_error = self._is_error_in_evaluation(first, parts, whole, tolerance) and is_error
        if losses and differ(losses, tolerance):
            text = describe(losses, None if whole is not None else num_microbatches, tolerance, self._name_of(first))
            said.append(_Said(is_error, True, text))
        if check is None or any(self._rehearsal.tell(any(each.is_error for each in said))):
            return said
        if is_training and not any(self._rehearsal.tell(bool(said))):
            said += self._compare_slopes(first, parts, tolerance)
        few = batching.num_to_join(first.parts, min(len(parts), 2))
        ran = first
        if len(parts) < num_microbatches:  # what is left has rows of as many samples
            ran = replace(first, parts=parts, batch=batching.first_parts(first.batch, first.parts, len(parts)))
        gone_on = self._go_on(ran, few, pairs, check, tolerance)
        if pairs:
            unfit = _tried(lambda: check.find_rules([pairs, others, gone_on], tolerance)) or {}
            if others:
                unfit = _tried(lambda: check.told_of_true_batches(unfit, [pairs, gone_on], tolerance)) or {}
            unfit |= _tried(lambda: check.unfit_texts(pairs, tolerance)) or {}
            if said:  # the loss that is logged too
                loss = " instead of ".join(apart(losses[0].mean, losses[0].of_all))
                unfit = {place: how for place, how in unfit.items() if how != loss}
            if unfit:
                text = describe_numbers(unfit) if is_training else describe_in_evaluation(unfit)
                said.append(_Said(False, False, text, in_one_piece=not is_training))
            if is_late:
                said += [_Said(False, False, text) for text in self._changed(check, first, weighed_by)]
        return said

    def _name_of(self, of: StepOnBatch) -> str:
        number = self._number[of.source]
        return "the first batch" if number == 1 else f"training batch {number}"

    def _compare_slopes(self, first: StepOnBatch, parts: Microbatches, tolerance: float) -> list[_Said]:
        """What to say of the gradients of a batch whose loss is the mean of its microbatches'; once for all batches.

        Not of divided layers, which gather their weights for a backward, and end it where it has passed them.
        """
        if self._are_slopes_known or self._divided:
            return []
        self._are_slopes_known = True
        found = [self._rehearsal.slopes(first, parts, 0)]

        def share() -> float:
            return _tried(lambda: slopes.gap(found, tolerance)) or 0.0

        if any(self._rehearsal.tell(bool(share()))):
            found += [self._rehearsal.slopes(first, parts, draw) for draw in range(1, 1 + EXTRA_DRAWS)]
        gap = share()
        return [_Said(False, False, slopes.describe(gap, self._name_of(first)))] if gap else []

    def _is_error_in_evaluation(
        self, first: StepOnBatch, parts: Microbatches, whole: Whole | None, tolerance: float
    ) -> bool:
        """Whether the loss is none of microbatches also if nothing moves that does in training only."""
        if not self._rehearsal.evaluates:
            return False
        pairs = self._rehearsal.pair(first, parts, 1, whole, evaluates=True)
        return no_weights_explain(list(map(losses_of, pairs)), tolerance)

    def _go_on(
        self, first: StepOnBatch, number: int, pairs: Sequence[Pair], check: NumberCheck, tolerance: float
    ) -> list[Pair]:
        """Run the first microbatches once more, where what was left of the batch is there: it may decide."""
        left: Any = {}
        if pairs:
            left = _tried(lambda: pairs[0].whole.effects.outcome((1,), (1.0,), is_sent=self._engine.num_ranks > 1))
        changes = left.get("changes") if left else None
        if not any(self._rehearsal.tell(bool(changes))):
            return []
        self._leaves_something |= first.kind == "train"
        exchange = ValueExchange(
            self._engine.device, self._engine.group, self._engine.host_group(), self._engine.last_rank
        )
        with untouched(self._owner), self._rehearsal.silent(True):  # rows of other samples may be left
            Effects(self._owner, self._runner.programs.modules).change(exchange.share(changes))
            parts = first.parts[:number]
            found = self._rehearsal.pair(first, parts, 0)
            for pair in found:  # lists that go on have items now
                self._learnt(first, pair.parts)
            if any(self._rehearsal.tell(bool(found) and self._differ(check, found, tolerance))):
                self._rehearsal.draw_again(first, parts, found, None)
        return found

    def _is_unsure(self, first: StepOnBatch, run: StepRun) -> bool:
        """Learn of a run; whether there are numbers that may be others than on one device: not only rows of samples."""
        numbers, rules = self._learnt(first, run), self._runner.rules.of(first.source)
        return any(not n.dim() or rules.is_number(place, n.dim()) for place, n in numbers.items())

    def _learnt(self, first: StepOnBatch, run: StepRun) -> Numbers:
        """The numbers of a run; of what has no rule yet one is learnt, as it is in training."""

        def find() -> Numbers:
            looking = self._runner.rules.looking(first, run, self._engine.seed)
            with self._rehearsal.precise(), looking as rules:
                return run.numbers(rules)

        return _tried(find) or {}

    def _differ(self, check: NumberCheck, pairs: Sequence[Pair], tolerance: float) -> bool:
        return bool(_tried(lambda: check.differs(pairs, tolerance)))


def _tried(function: Callable[[], T]) -> T | None:
    """What a function of values returns, which may be anything; None if it fails, since other ranks must not wait."""
    try:
        with trial():
            return function()
    except Exception as error:
        _log.info("What a step leaves is not compared with that of one device. %s: %s", type(error).__name__, error)
        return None


def _how_many_unexplained(unexplained: Unexplained, pairs: Sequence[Pair], tolerances: Sequence[float]) -> int:
    return sum(_tried(partial(unexplained.number, pairs, each)) or 0 for each in tolerances)
