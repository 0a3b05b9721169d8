"""How values of microbatches belong together: learnt by comparing two of them with what both leave as one batch.

What a step returns and leaves has mostly one form only: a loss is averaged, predictions are joined. But an integer may
count something or be an index, a list may have an item for each sample or for each layer, and a tensor may be as long
as a microbatch by chance. So where that matters the step is traced on the first microbatch and on the first two as one
batch. Of what follows from the batch alone a trace has the values, of what layers compute only the form.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.step.batches.structures import taken_apart

Rule = str | int
"""Numbers: `sum`, `mean` (where a sum would be expected), `first` (they are equal), `largest`, `least`, `begin` (that
of the first), `end` (the last), `samples` (the mean over samples, whatever the `batch_size` of a log says), `weighed`
(added up by weights as the loss is, also where these do not add up to 1). Lists: `items` are joined, `parts` merged.
Tensors: the dimension along which they are joined, `fixed` (floating-point numbers of which nothing is known), `counts`
(such integers), or one for numbers. Texts: `first` (they are equal), `begin`, `end`, or `apart`: that of both as one
batch is another. `begin` and `end` of tensors and lists: see `ROWS`."""
OF_NUMBERS = frozenset(("sum", "mean", "first", "largest", "least", "begin", "end", "fixed", "counts"))
"""Rules that say something of numbers, and of tensors and arrays of them."""
OF_TOTALS = "totals"
"""The rule of what is logged and made of counts that the step keeps, also in the batch with which they begin."""
RUNNING = (
    *("running mean", "running variance", "running variance by torch.var", "running variance of n - 1"),
    *("running squares", "running deviation"),
)
"""Rules of numbers that say of all samples so far how they lie; see `running`."""
CHOSEN = ("largest", "least", "begin", "end")
"""Those that take one of the numbers."""
ROWS = ("begin", "end")
"""Of tensors and lists they take the first or last rows of all samples, of which a microbatch may have fewer."""
_log = logging.getLogger(__name__)
_TRIES = 8
"""So often the step is traced for a place, since numbers may be 0 in the first batches, or of other sizes later."""
_MOST = 64
"""So often it is traced at all: there may be other things in each batch."""
_KNOWN = 64
"""Larger tensors have no values in a trace."""


Form = Any
"""Of numbers, also in tensors and arrays, how many dimensions they have, and whether these are floating-point numbers;
of lists and tuples the type of their first item; of others their type."""
Size = tuple[int, ...] | int | None


def _form(value: Any, samples: int = 0) -> tuple[Form, Size]:
    """The form of a value, and its size; of an integer, whether it is the number of samples, and may count these."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        is_float = dtype.is_floating_point or dtype.is_complex
        size = None if value.is_nested else tuple(value.shape)
        return (value.dim(), "f" if is_float else "b" if dtype is torch.bool else "i"), size
    if kind in _OF_NUMBERS:
        return _OF_NUMBERS[kind], _OF_ALL_SAMPLES if kind is int and value == samples > 1 else ()
    if isinstance(value, (np.ndarray, np.generic)):
        return (value.ndim, _OF_ARRAYS.get(value.dtype.kind, value.dtype.kind)), tuple(value.shape)
    if isinstance(value, (list, tuple)):
        item = value[0] if len(value) else None
        return ("items", type(item), getattr(item, "ndim", None)), len(value)
    return kind, None


_OF_ALL_SAMPLES = (1,)
_OF_NUMBERS: dict[type, Form] = {int: (0, "i"), float: (0, "f"), complex: (0, "f"), bool: (0, "b")}
_KINDS = "ifb"
ByValues = dict[tuple[str, Form], Rule | None]
Before = tuple[ByValues, dict[tuple[str, Form], tuple[str, ...]]]
"""Rules of numbers, and those that are found to fit so far."""
_OF_ARRAYS = {"u": "i", "c": "f"}


class Rules:
    """What has been learnt of one kind of step.

    A rule is for values of the form that it was learnt of, see `_form`: what a step returned as rows may be a list in
    another batch. For a size that was not seen yet one looks again; if that tells nothing, the rule of others holds.

    Attributes:
        candidates: Of which counts of the step what is logged at a place was made so far in each batch; see `totals`.
        made: What each of these gives for the latest batch.
        tells_nothing: In how many batches nobody could tell.
        totals: Where it was made of counts in some batch.
        sums: Which modules and objects add up numbers of samples, so that floating-point ones grow by the sum.
    """

    def __init__(self) -> None:
        self._of_sizes: dict[tuple[str, Form, Size], Rule] = {}
        self._of_forms: dict[tuple[str, Form], Rule] = {}
        self._by_values: ByValues = {}
        self._places: set[str] = set()
        self._fitting: dict[tuple[str, Form], tuple[str, ...]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._look: Callable[[], object] | None = None
        self._tries: dict[tuple[str, Form], int] = {}
        self._looks_made = 0
        self._samples = 0
        self.candidates: dict[str, frozenset[Any]] = {}
        self.made: dict[str, dict[Any, float]] = {}
        self.tells_nothing: Counter[str] = Counter()
        self.totals: set[str] = set()
        self.sums: set[Any] = set()

    @contextmanager
    def comparing(self, look: Callable[[], object] | None, samples: int = 0) -> Iterator[None]:
        """A batch is put together while the context is open.

        Args:
            look: Compares and calls `learn`; None: there is nothing to compare.
            samples: How many the first microbatch has.
        """
        self._look, self._samples = look, samples
        try:
            yield
        finally:
            self._look = None  # it holds the batch

    def of(self, path: str, like: Any, *, ask: bool = True) -> Rule | None:
        """The rule of the values at a place; None: it is not known.

        Args:
            path: The place.
            like: One of the values.
            ask: Whether it is worth looking.
        """
        if path not in self._places and not (ask and self._look is not None):
            return None  # of most places, at each batch
        form, size = _form(like, self._samples)
        known = self._known(path, form, size)
        is_open = known is not None and known[0] in CHOSEN and self._is_open(path, form)
        if (known is None or is_open) and self._looks(path, form, ask=ask or is_open):
            known = self._known(path, form, size)
        return self._of_forms.get((path, form)) if known is None else known[0]

    def _known(self, path: str, form: Form, size: Size) -> tuple[Rule | None] | None:
        fitting = self._fitting.get((path, form))
        if self._by_values and (path, form) in self._by_values:
            rule = self._by_values[path, form]
            return (fitting[0] if fitting and rule in CHOSEN and rule not in fitting else rule,)
        is_told = fitting is not None and fitting != CHOSEN
        found = fitting[0] if fitting and is_told else self._of_sizes.get((path, form, size))
        return None if found is None else (found,)

    def _is_open(self, path: str, form: Form) -> bool:
        """Whether a trace may tell which of some rules it is."""
        asked = (path, form) in self._tries
        return len(self._fitting.get((path, form), () if asked else CHOSEN)) > 1

    def _looks(self, path: str, form: Form, *, ask: bool) -> bool:
        """Look, where that may tell something of a place; whether it was done."""
        tries = self._tries.get((path, form), 0)
        if not ask or self._look is None or self._looks_made >= _MOST or tries >= _TRIES:
            return False
        look, self._look = self._look, None
        self._looks_made += 1
        try:
            look()
        except Exception as error:  # values may be anything
            _log.info("What a step leaves cannot be compared with a trace of it: %s", error)
        self._tries[path, form] = tries + 1
        return True

    def note_shape(self, path: str, shape: Sequence[int]) -> None:
        """A tensor at a place has this shape on one device, or a list this length."""
        known = self._shapes.get(path, ())
        self._shapes[path] = tuple(map(max, shape, known)) if len(known) == len(shape) else tuple(shape)

    def rows_taken(self, path: str, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[int, int] | None:
        """The dimension along which values are the first or last rows of samples, and how many; None: they are all.

        Args:
            path: Where they are.
            shapes: What microbatches have left: as many rows as are taken, or as they have samples.
            sizes: How many these are.
        """
        for dim, number in enumerate(self._shapes.get(path, ())):
            rows = [shape[dim] if dim < len(shape) else -1 for shape in shapes]
            if min(rows) < number and rows == [min(number, size) for size in sizes]:
                return dim, number
        return None

    def is_number(self, path: str, dimensions: int) -> bool:
        """Whether numbers of so many dimensions at a place may be no rows of samples."""
        forms = {(dimensions, kind) for kind in _KINDS}
        rules = [rule for (place, form, _), rule in self._of_sizes.items() if place == path and form in forms]
        return any(rule in OF_NUMBERS for rule in (*rules, *(self._by_values.get((path, form)) for form in forms)))

    def set(self, rules: Mapping[str, Rule | None], dimensions: int) -> Before:
        """Let rules of numbers be what they have turned out to be by values, not forms.

        Args:
            rules: Rules by place; None: there is none.
            dimensions: How many the numbers have.

        Returns:
            What there was, for `put_back`.
        """
        self._places.update(rules)
        before = self._by_values, self._fitting.copy()
        of_forms = {(place, (dimensions, kind)): rules[place] for place in rules for kind in _KINDS}
        self._by_values = self._by_values | of_forms
        return before

    def fit(self, paths: Iterable[str], fitting: Sequence[Rule], dimensions: int) -> None:
        """Of rules that take one of the numbers these were found to fit by values.

        Args:
            paths: Where.
            fitting: The rules; if the likeliest is another, it holds.
            dimensions: How many the numbers have.
        """
        if fitting[0] in CHOSEN:
            for path, kind in product(paths, _KINDS):
                self.narrow(path, (dimensions, kind), fitting)

    def put_back(self, before: Before) -> None:
        """Let those be as they were."""
        self._by_values, self._fitting = before[0], before[1].copy()

    def learn(self, path: str, first: Any, second: Any, small: Any, large: Any, other: Any = None) -> None:
        """Compare what is at one place.

        Args:
            path: The place.
            first: What the first microbatch has left there.
            second: What the second has.
            small: What a trace of the first leaves, see `form_of`.
            large: What a trace of both as one batch leaves.
            other: What a trace of the second leaves, with other numbers for what layers compute; None: nobody knows.
        """
        found = (first, second, small, large)
        if any(type(value) is not type(first) and not _is_marked(value, first) for value in found):
            return
        if isinstance(first, (torch.Tensor, np.ndarray)):
            rule = _rule_of_tensors(*map(torch.as_tensor, found))
            if rule in ROWS or isinstance(rule, tuple):
                self.note_shape(path, tuple(large.shape))
        elif isinstance(first, (int, float, np.number)):
            rule = None if isinstance(first, bool) else _rule_of_numbers(first, second, small, large, other)
        elif isinstance(first, (str, bytes)):
            rule = _rule_of_texts(first, second, small, large)
        elif isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
            rule = _rule_of_lists(first, second, small, large)
            if rule != "items":
                self.note_shape(path, (len(large),))
        else:
            rule = "parts"
        form, size = _form(first, self._samples)
        if isinstance(rule, tuple):
            rule = self.narrow(path, form, rule)
        elif rule == "first":  # all of them fit
            self._fitting.setdefault((path, form), CHOSEN)
        if rule is not None:
            self._places.add(path)
            self._of_sizes.setdefault((path, form, size), rule)
            self._of_forms.setdefault((path, form), rule)
        if rule == "parts":
            *named, others = (_named_parts(value) for value in (*found, other))
            for name in named[0]:
                if all(name in parts for parts in named):
                    first, second, small, large = (parts[name] for parts in named)
                    self.learn(path + name, first, second, small, large, others.get(name))

    def narrow(self, path: str, form: Form, fitting: Sequence[Rule]) -> Rule | None:
        """The likeliest of the rules that fit a batch and did before, as one number is often both largest and last."""
        left = tuple(rule for rule in self._fitting.get((path, form), CHOSEN) if rule in fitting)
        self._fitting[path, form] = left = left or tuple(rule for rule in CHOSEN if rule in fitting)
        return next(iter(left), None)


def form_of(value: Any, is_known: Callable[[torch.Tensor], bool]) -> Any:
    """What a trace leaves, without memory: tensors whose values are not known, or that are large, are on `meta`."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.numel() <= _KNOWN and is_known(value):
            return value.detach().cpu().clone()
        return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
    parts = taken_apart(value)
    return value if parts is None else parts.rebuild([form_of(part, is_known) for part in parts.values])


def _named_parts(value: Any) -> dict[str, Any]:
    parts = taken_apart(value)
    return {} if parts is None else dict(zip(parts.names, parts.values, strict=True))


def _is_marked(number: Any, like: Any) -> bool:
    """Whether a trace has given a number of a class of its own, as it does not know it: it follows from values."""
    return type(like) in (int, float) and isinstance(number, type(like)) and not isinstance(number, bool)


def _rule_of_numbers(first: Any, second: Any, small: Any, large: Any, other: Any) -> Rule | tuple[str, ...] | None:
    is_count = isinstance(first, (int, np.integer))
    told = [(small, first), *([] if other is None else [(other, second)])]
    # what stands for the values of layers may come to what they come to, such as how many labels are 0
    if not all(type(one) is type(of) and math.isclose(one, of, rel_tol=1e-6) for one, of in told):
        return "sum" if is_count and min(small, large) >= 0 else None
    if first == second == large:
        return "first" if large else None  # nothing may be an index or a count
    if math.isclose(large, first + second, rel_tol=1e-6):
        return "sum"
    of_rules = zip(CHOSEN, (max(first, second), min(first, second), first, second), strict=True)
    return tuple(rule for rule, value in of_rules if value == large) if first and first != second else None


def _rule_of_texts(first: Any, second: Any, small: Any, large: Any) -> Rule | None:
    if small != first:  # a trace does not know it
        return None
    if large == first:
        return "first" if second == first else "begin"
    return "end" if large == second else "apart"


def _rule_of_lists(first: Any, second: Any, small: Any, large: Any) -> Rule | None:
    if len(small) != len(first) or len(large) > len(small):
        both, number = [*first, *second], len(large)
        if len(small) == len(first) and number < len(both):
            return "begin" if _is_same(large, both[:number]) else "end" if _is_same(large, both[-number:]) else "items"
        return "items"
    return "parts" if len(large) == len(second) == len(small) else None


def _is_same(values: Any, others: Any) -> bool:
    try:
        return list(values) == list(others)
    except Exception:  # a comparison may be anything
        return False


def _rule_of_tensors(
    first: torch.Tensor, second: torch.Tensor, small: torch.Tensor, large: torch.Tensor
) -> Rule | tuple[str, ...] | None:
    if small.shape != first.shape or large.dim() != small.dim():  # it depends on values
        return None
    growing = [dim for dim in range(small.dim()) if small.shape[dim] != large.shape[dim]]
    if growing:
        return _rule_of_rows(first, second, large, growing[0]) if len(growing) == 1 else "apart"
    if first.shape != second.shape or first.dtype == torch.bool:
        return None
    is_count = not (first.is_floating_point() or first.is_complex())
    first, second = first.detach().cpu(), second.detach().cpu()
    if small.is_meta or large.is_meta or not torch.allclose(small, first, equal_nan=True):
        return "counts" if is_count else "fixed"
    if torch.equal(first, second) and torch.equal(first, large):
        return "first" if bool(large.any()) else None
    if torch.allclose(large, first + second):
        return "sum"
    of_rules = zip(CHOSEN, (torch.maximum(first, second), torch.minimum(first, second), first, second), strict=True)
    fitting = () if torch.equal(first, second) else tuple(rule for rule, value in of_rules if torch.equal(value, large))
    return fitting or ("sum" if is_count else "fixed")


def _rule_of_rows(first: torch.Tensor, second: torch.Tensor, large: torch.Tensor, dim: int) -> Rule:
    """What grows along a dimension has a row for each sample, or the first or last of all, more than one has."""
    number = large.shape[dim]
    if large.is_meta or second.dim() != large.dim() or number >= first.shape[dim] + second.shape[dim]:
        return dim
    both = torch.cat([first.detach().cpu(), second.detach().cpu()], dim)
    if torch.equal(large, both.narrow(dim, 0, number)):
        return "begin"
    return "end" if torch.equal(large, both.narrow(dim, both.shape[dim] - number, number)) else dim


_ELEMENTS: dict[Rule, tuple[Any, Any]] = {
    "largest": (torch.maximum, np.maximum),
    "least": (torch.minimum, np.minimum),
}


def _as_tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors and numbers as tensors of one type."""
    device = next(value.device for value in values if isinstance(value, torch.Tensor))
    tensors = [torch.as_tensor(value, device=device) for value in values]
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return [tensor.to(dtype) for tensor in tensors]


def merged_by(rule: Rule | None, values: Sequence[Any]) -> tuple[Any] | None:
    """Numbers, or tensors of one shape, put together by a rule of numbers; None: it says nothing of these."""
    if len({isinstance(value, torch.Tensor) for value in values}) > 1:  # `loss[mask].mean() if mask.any() else 0.0`
        values = _as_tensors(values)
    first = values[0]
    is_tensor, is_array = isinstance(first, torch.Tensor), isinstance(first, np.ndarray)
    if rule in ("sum", "counts"):
        total = sum(values)
        return (total.to(first.dtype) if is_tensor else total.astype(first.dtype) if is_array else type(first)(total),)
    if rule in ("begin", "end"):
        return (first if rule == "begin" else values[-1],)
    if rule in _ELEMENTS:
        if is_tensor or is_array:
            return (reduce(_ELEMENTS[rule][is_array], values),)
        return (max(values) if rule == "largest" else min(values),)
    if is_tensor or is_array:
        is_same = rule == "first" and all(bool((value == first).all()) for value in values)
    else:
        is_same = rule == "first" and all(value == first for value in values)
    return (first,) if is_same else None
