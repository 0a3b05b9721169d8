"""Whether numbers that a step leaves, returns and logs are those of one device: compared once, as losses are.

Most are means or sums over microbatches, and `rules` tell which. That is known of what follows from the batch, by a
trace, and not of what layers compute: the largest output, a sum over samples. So what the first batch comes to by
microbatches is compared with what it comes to in one piece. Where these differ, and another rule gives what one device
has, that rule holds from there on; where none does, the number is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from lightning_pfo.strategy.step.batches.rules import OF_TOTALS, RUNNING, Rule, Rules
from lightning_pfo.strategy.step.effects.merge import GROWN, SET
from lightning_pfo.strategy.step.first_batch.differences.losses import apart
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair
from lightning_pfo.strategy.step.first_batch.differences.texts import differing_texts
from lightning_pfo.strategy.step.metrics.totals import choose_totals
from lightning_pfo.strategy.step.outcome import Numbers

_RANDOM = 3  # how far apart random numbers must be, in what they spread themselves
_LEAST_TOLERANCE = 1e-4  # nothing trains on them, and they may be sums of many roundings
_SMALLEST = 1e-6  # smaller numbers are taken for what rounding leaves
_FEW_ROWS, _FEW_ROUNDED_ROWS = 0.1, 0.5  # so many integers of rows may be others, by rounding of what chooses them
_MADE_OF_COUNTS = "made of counts"
_CANDIDATES: dict[str, dict[str, Rule | None]] = {
    "sum": {"": "sum", GROWN: "sum"},
    "mean": {"": "mean", GROWN: "mean"},
    "mean over samples": {"": "samples", GROWN: "mean"},
    "as the loss": {"": "weighed", GROWN: None},
    _MADE_OF_COUNTS: {"": OF_TOTALS, GROWN: None},
    "sum anew": {"": "sum", GROWN: None, SET: "sum"},
    "largest": {"": "largest", GROWN: "largest"},
    "least": {"": "least", GROWN: "least"},
    "begin": {"": "begin", GROWN: "begin"},
    "end": {"": "end", GROWN: "end"},
    **{name: {"": name, GROWN: None, SET: None} for name in RUNNING},
}
"""Rules to try, the likelier first; what they are for a number, and for how it grows and is set."""
_NAMED = 5
"""Of more numbers only the first are named."""
_PUT_TOGETHER = "What a step leaves, returns or logs is put together from that of its microbatches."


Situation = Sequence[Pair]
"""The same batch, run with several draws of random numbers; or once, if nothing differs."""


@dataclass
class NumberCheck:
    """Finds rules for the numbers of one kind of step.

    Args:
        rules: What is known of them, to which more is added.

    Attributes:
        open: The rules that were found to fit, the likelier first: later batches tell whether that was by chance.
        unfit: The numbers that none fits.
        untold: The numbers that tell little so far: 0 by microbatches too, or that of one device maybe by chance.
        changed: Those that were like one device's in an earlier batch, and to which another rule fits now.
    """

    rules: Rules
    open: dict[str, list[str]] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    untold: set[str] = field(default_factory=set)
    changed: dict[str, str] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    _told_texts: set[str] = field(default_factory=set)
    _dimensions: dict[str, int] = field(default_factory=dict)

    def differing(self, situation: Situation, tolerance: float) -> dict[str, str]:
        """The numbers that are others by microbatches than in one piece, by more than rounding and chance."""
        wholes = [pair.whole.numbers(self.rules) for pair in situation]
        by_parts = []
        for pair, whole in zip(situation, wholes, strict=True):
            by_parts.append(pair.parts.numbers(self.rules))
            choose_totals(self.rules, whole)
        for pair, one, other in zip(situation, by_parts, wholes, strict=True):
            zeros = pair.parts.zeros() | pair.whole.zeros()
            _complete(one, other, zeros)
            _complete(other, one, zeros)
        of_parts = [
            pair.parts.numbers_of(index) for pair in situation for index in range(len(pair.parts.recorder.sizes))
        ]
        for place, number in ((place, number) for numbers in of_parts for place, number in numbers.items()):
            self._dimensions[_without_form(place)] = number.dim()
        for place, number in ((place, number) for numbers in wholes for place, number in numbers.items()):
            if number.dim():
                self.rules.note_shape(place, tuple(number.shape))
        found = {}
        first = wholes[0] if wholes else {}
        of_one_number = _lists_of_one_number(first)
        for place in dict.fromkeys(place for numbers in (*by_parts, *wholes) for place in numbers):
            of = _without_form(place)
            of_each = [numbers[place] for numbers in of_parts if place in numbers]
            said = _difference(place, by_parts, wholes, of_each, tolerance)
            are_zeros = _are_roundings([*(each[place] for each in (*by_parts, *wholes) if place in each), *of_each])
            if not are_zeros:
                self._seen.add(of)
            if are_zeros or _list_of(place) in of_one_number or _tells_little(of_each, first.get(place)):
                if of == place:
                    self.untold.add(place)
            else:
                self.untold.discard(place)
            if said and of not in self.unfit:
                found[of] = said
        return found

    def differs(self, situation: Situation, tolerance: float) -> bool:
        """Whether some number or text is another by microbatches than in one piece."""
        return bool(self.differing(situation, tolerance) or self._other_texts(situation, tolerance))

    def unfit_texts(self, situation: Situation, tolerance: float) -> dict[str, str]:
        """The texts that are others than in one piece, of which each kind is told once, and how they differ."""
        found = self._other_texts(situation, tolerance)
        self._told_texts |= found.keys()
        return dict(found.values())

    def _other_texts(self, situation: Situation, tolerance: float) -> dict[str, tuple[str, str]]:
        rounds = tolerance > _LEAST_TOLERANCE
        return differing_texts(situation, self.rules, tolerance, rounds=rounds, told=self._told_texts)

    @contextmanager
    def trial(self) -> Iterator[NumberCheck]:
        """A check that knows what this one does, of which nothing is kept that it learns while the context is open."""
        trial = replace(self, open=dict(self.open), unfit=set(self.unfit), untold=set(self.untold))
        trial._told, trial._seen = set(self._told), set(self._seen)
        before = self.rules.set({}, 0)
        try:
            yield trial
        finally:
            self.rules.put_back(before)

    def take(self, rules: Mapping[str, str]) -> None:
        """Put numbers together by these rules, called as `find_rules` calls them."""
        for place, name in rules.items():
            self._set(place, name)

    def find_rules(
        self, situations: Sequence[Situation], tolerance: float, names: Iterable[str] = tuple(_CANDIDATES)
    ) -> dict[str, str]:
        """Find rules for numbers that differ.

        Args:
            situations: Batches that were run, from different states of the module.
            tolerance: The relative difference that rounding explains.
            names: The rules that are tried.

        Returns:
            The numbers that no rule explains, and how they differ; each is told once.
        """

        def differing() -> tuple[dict[str, str], dict[str, str]]:
            of_each = [self.differing(each, tolerance) for each in situations]
            return {place: said for found in of_each for place, said in found.items()}, of_each[0]

        self.changed = {}
        wrong, at_first = differing()
        asked = dict.fromkeys((*wrong, *self.open))
        fitting: dict[str, list[str]] = {place: [] for place in asked}
        nearly: dict[str, str] = {}
        for name in names if asked else ():
            before = self.rules.set({}, 0)
            for place in asked:
                self._set(place, name)
            still, still_at_first = differing()
            for place in asked:
                if place not in still and name in self.open.get(place, _CANDIDATES):
                    fitting[place].append(name)
                if place in at_first and place not in still_at_first:
                    nearly.setdefault(place, name)
            self.rules.put_back(before)
        known = self._told - self.open.keys()
        self.open = {place: names for place, names in fitting.items() if names}
        learnt_anew = [place for place in wrong if place in known and place in self.open]
        self.changed = {place: f"{wrong[place]}; now: {self.open[place][0]}" for place in learnt_anew}
        self._told |= self._seen
        for place, names in self.open.items():
            self._set(place, names[0])
            self.rules.fit((place, place + GROWN), names, self._dimensions.get(place, 0))
        unfit = {place: said for place, said in wrong.items() if place not in self.open}
        if unfit and self.open:  # they may be made of numbers of which the rules are known by now
            for place in unfit:
                self._set(place, _MADE_OF_COUNTS)
            still, _ = differing()
            self.open |= {place: [_MADE_OF_COUNTS] for place in unfit if place not in still}
            unfit = {place: said for place, said in unfit.items() if place in still}
        for place in nearly.keys() & unfit.keys():  # as the least loss so far: nearer than what no batch has
            self._set(place, nearly[place])
        self.unfit |= set(unfit)
        return unfit

    def told_of_true_batches(
        self, unfit: dict[str, str], situations: Sequence[Situation], tolerance: float
    ) -> dict[str, str]:
        """What to tell of numbers of which no rule fits a batch with other labels, too: of tables what true ones tell.

        Labels may say which rows are written, of which no two are the same.

        Args:
            unfit: The numbers, and how they differ.
            situations: The batches whose labels were not changed.
            tolerance: The relative difference that rounding explains.
        """
        differing = {place for each in situations for place in self._differing_also(each, unfit, tolerance)}
        told = {place: how for place, how in unfit.items() if place in differing or not self._dimensions.get(place)}
        self.unfit -= unfit.keys() - told.keys()
        return told

    def _differing_also(self, situation: Situation, unfit: Collection[str], tolerance: float) -> set[str]:
        before, self.unfit = self.unfit, self.unfit.difference(unfit)
        try:
            return set(self.differing(situation, tolerance))
        finally:
            self.unfit = before

    def _set(self, place: str, candidate: str) -> None:
        rules = {place + how: rule for how, rule in _CANDIDATES[candidate].items()}
        self.rules.set(rules, self._dimensions.get(place, 0))


def _without_form(place: str) -> str:
    """Where a number is, of how it grows or is set there."""
    return place.removesuffix(GROWN).removesuffix(SET)


def _complete(numbers: Numbers, others: Numbers, zeros: Collection[str]) -> None:
    """Add numbers that one run has left as they were, and the other has changed; of some they were 0."""
    numbers |= {place: torch.zeros_like(others[place]) for place in zeros if place in others and place not in numbers}
    for place in [place for place in others if place.endswith(GROWN) and place not in numbers]:
        set_ = place.removesuffix(GROWN) + SET
        numbers[place] = torch.zeros_like(others[place])
        if set_ in others:
            numbers[set_] = others[set_] - others[place]


def _difference(
    place: str,
    by_parts: Sequence[Numbers],
    wholes: Sequence[Numbers],
    of_each: Sequence[torch.Tensor],
    tolerance: float,
) -> str:
    """How a number differs, in words; nothing if it does not."""
    merged = [numbers[place] for numbers in by_parts if place in numbers]
    whole = [numbers[place] for numbers in wholes if place in numbers]
    forms = [{number.shape for number in each} for each in (merged, whole)]
    is_random = any(len(each) > 1 for each in forms) or 0 < len(merged) < len(by_parts) or 0 < len(whole) < len(wholes)
    if is_random:
        return ""
    if forms[0] != forms[1]:
        return f"{_form(merged)} instead of {_form(whole)}"
    ours, theirs = torch.stack(merged), torch.stack(whole)
    if not ours.numel() or not bool(torch.isfinite(theirs).all()):
        return ""
    if not bool(torch.isfinite(ours).all()):  # as the deviation of a single sample, the mean over a mask of none
        return _in_words(place, ours[0], theirs[0], int((~torch.isfinite(ours)).any(0).int().argmax()))
    if _are_roundings([*merged, *whole, *of_each]):
        return ""
    difference = (ours.mean(0) - theirs.mean(0)).abs()
    chance = _RANDOM * (ours.amax(0) - ours.amin(0) + theirs.amax(0) - theirs.amin(0))
    seen = [number.abs().max() for number in of_each if number.numel()]
    scale = max(_SMALLEST, *map(float, (ours.abs().max(), theirs.abs().max(), *seen)), _rounded(place, wholes))
    beyond = difference - chance - max(tolerance, _LEAST_TOLERANCE) * scale
    if not bool((beyond > 0).any()):
        return ""
    are_rows = any(number.shape != whole[0].shape for number in of_each)
    few = _FEW_ROWS if tolerance < _LEAST_TOLERANCE else _FEW_ROUNDED_ROWS
    if are_rows and torch.equal(theirs, theirs.round()) and float((beyond > 0).float().mean()) < few:
        return ""  # such as which of two equal scores is the larger
    return _in_words(place, merged[0], whole[0], int(beyond.argmax()))


def _are_roundings(numbers: Sequence[torch.Tensor]) -> bool:
    """Whether they are 0, or what sums leave that cancel, as of a divergence from itself: some above and some below."""
    found = [number for number in numbers if number.numel()]
    return not any(bool(number.any()) for number in found) or (
        all(float(number.abs().max()) < _SMALLEST for number in found)
        and min(float(number.min()) for number in found) <= 0 <= max(float(number.max()) for number in found)
    )


def _list_of(place: str) -> str:
    """Where the list is of which a number is an item; none: ""."""
    return place.rpartition("[")[0] if place.endswith("]") else ""


def _lists_of_one_number(numbers: Numbers) -> set[str]:
    """The lists of which all items are the same number."""
    found: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    for place, number in numbers.items():
        if not number.dim() and (name := _list_of(place)):
            found[name].append(number)
    return {name for name, items in found.items() if len(items) > 1 and all(each == items[0] for each in items)}


def _tells_little(of_each: Sequence[torch.Tensor], whole: torch.Tensor | None) -> bool:
    """Whether it may be by chance that numbers are those of one device, as where a decoder finds one class only.

    Rows are all the same; or microbatches have one number in common, and one device has their sum.
    """
    if whole is None:
        return False
    if whole.dim():
        return whole.numel() > 1 and bool((whole == whole.flatten()[0]).all())
    numbers = [float(number) for number in of_each if not number.dim()]
    return len(numbers) > 1 == len(set(numbers)) and float(whole) == sum(numbers)


def _in_words(place: str, ours: torch.Tensor, theirs: torch.Tensor, index: int) -> str:
    one, other = apart(float(ours.reshape(-1)[index]), float(theirs.reshape(-1)[index]))
    how = "grows by " if place.endswith(GROWN) else f"at position {index} " if ours.numel() > 1 else ""
    return f"{how}{one} instead of {other}"


def _rounded(place: str, wholes: Sequence[Numbers]) -> float:
    """How large the number is that has grown and was rounded; 0 for integers, and for others than growths."""
    if not place.endswith(GROWN):
        return 0.0
    found = [numbers.get(place.removesuffix(GROWN) + SET) for numbers in wholes]
    return max((float(n.abs().max()) for n in found if n is not None and not torch.equal(n, n.round())), default=0.0)


def _form(numbers: Sequence[torch.Tensor]) -> str:
    if not numbers:
        return "nothing"
    return f"a tensor of shape {tuple(numbers[0].shape)}" if numbers[0].dim() else f"{float(numbers[0]):.6g}"


def describe_changed(changed: dict[str, str]) -> str:
    """What is said of numbers that another rule explains than in earlier batches."""
    return (
        f"{_PUT_TOGETHER} In a later batch these are others than on one device, and are put together by another rule "
        f"from here on: {_named(changed)}. In batches since this step was compared last they may be others than on "
        f"one device, as also where a name has two meanings by turns. Give each meaning its own name "
        f"from the first batch on."
    )


def describe(unfit: dict[str, str]) -> str:
    """What is said of numbers of training that no rule explains, with ways out."""
    return (
        f"{_PUT_TOGETHER} On one of the first batches these are others than on one device, and neither their mean nor "
        f"their sum, largest, least, first or last is what one device has: {_named(unfit)}. Keep or return what they "
        f"are computed from (tensors with a row for each sample are joined), and compute them, or tell metric objects, "
        f"after the step (in on_train_batch_end, or your loop); or use loss_over='batch' with schedule='gpipe'. Metric "
        f"objects that are told of samples, each by itself, may be logged with on_step=False and on_epoch=True. "
        f"check_loss=False leaves the comparison out."
    )


def describe_in_evaluation(unfit: dict[str, str]) -> str:
    """What is said of those of an evaluation, whose batches are not divided from there on."""
    return (
        f"{_PUT_TOGETHER} In an evaluation these are others than on one device: {_named(unfit)}. So it is with what "
        f"says of a sample how it compares with others of the batch (a rank, a position, a similarity to all), with "
        f"texts that number samples, and with numbers that are no mean or sum over samples. From here on its batches "
        f"run in one piece, one stage after the other, which takes longer and gives what one device has. "
        f"check_loss=False leaves the comparison out."
    )


def _named(numbers: dict[str, str]) -> str:
    named = ", ".join(f"{place} ({said})" for place, said in list(numbers.items())[:_NAMED])
    return named + (f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else "")
