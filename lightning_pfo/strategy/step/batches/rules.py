"""How values of microbatches belong together: learnt by comparing two of them with what both leave as one batch.

What a step returns and leaves has mostly one form only: a loss is averaged, predictions are joined. But an integer may
count something or be an index, a list may have an item for each sample or for each layer, and a tensor may be as long
as a microbatch by chance. So where that matters the step is traced on the first microbatch and on the first two as one
batch. Of what follows from the batch alone a trace has the values, of what layers compute only the form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.step.batches.structures import holds_tensors, parts_of

Rule = str | int
"""Numbers: `sum`, `first` (they are equal), `largest`, `least`, `begin` (that of the first), `end` (the last). Lists:
`items` are joined, `parts` are merged. Tensors: the dimension along which they are joined, `fixed` (floating-point
numbers of which nothing is known), `counts` (such integers), or one for numbers. Texts: `first`, or `apart`: that of
both as one batch is another."""
CHOSEN = ("largest", "least", "begin", "end")
"""Those that take one of the numbers."""
_log = logging.getLogger(__name__)
_TRIES = 8
"""So often the step is traced, since numbers may be 0 in the first batches, or other things be returned later."""
_KNOWN = 64
"""Larger tensors have no values in a trace."""


class Rules:
    """What has been learnt of one kind of step."""

    def __init__(self) -> None:
        self._rules: dict[str, Rule] = {}
        self._look: Callable[[], object] | None = None
        self._tries = _TRIES

    @contextmanager
    def comparing(self, look: Callable[[], object] | None) -> Iterator[None]:
        """A batch is put together while the context is open.

        Args:
            look: Compares and calls `learn`; None: there is nothing to compare.
        """
        self._look = look
        try:
            yield
        finally:
            self._look = None  # it holds the batch

    def of(self, path: str, *, ask: bool = True) -> Rule | None:
        """The rule of the values at a place; None: it is not known.

        Args:
            path: The place.
            ask: Whether it is worth looking.
        """
        if ask and path not in self._rules and self._look is not None and self._tries:
            look, self._look = self._look, None
            self._tries -= 1
            try:
                look()
            except Exception as error:  # values may be anything
                _log.info("What a step leaves cannot be compared with a trace of it: %s", error)
        return self._rules.get(path)

    def set(self, rules: Mapping[str, Rule | None]) -> dict[str, Rule | None]:
        """Let rules be what they have turned out to be by values, not forms; None: there is none.

        Args:
            rules: Rules by place.

        Returns:
            What there was.
        """
        before = {place: self._rules.get(place) for place in rules}
        for place, rule in rules.items():
            if rule is None:
                self._rules.pop(place, None)
            else:
                self._rules[place] = rule
        return before

    def learn(self, path: str, first: Any, second: Any, small: Any, large: Any) -> None:
        """Compare what is at one place.

        Args:
            path: The place.
            first: What the first microbatch has left there.
            second: What the second has.
            small: What a trace of the first leaves, see `form_of`.
            large: What a trace of both as one batch leaves.
        """
        found = (first, second, small, large)
        if any(type(value) is not type(first) for value in found):
            return
        if isinstance(first, (torch.Tensor, np.ndarray)):
            rule = _rule_of_tensors(*map(torch.as_tensor, found))
        elif isinstance(first, (int, float, np.number)):
            rule = None if isinstance(first, bool) else _rule_of_numbers(first, second, small, large)
        elif isinstance(first, (str, bytes)):
            rule = _rule_of_texts(first, second, small, large)
        elif isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
            rule = _rule_of_lists(*map(len, found))
        else:
            rule = "parts"
        if rule is not None:
            self._rules.setdefault(path, rule)
        if rule == "parts":
            of_values = [parts_of(value, objects=holds_tensors(value)) for value in found]
            named = [dict(zip(parts.names, parts.values, strict=True)) for parts in of_values if parts is not None]
            for name in named[0] if len(named) == len(found) else ():
                if all(name in parts for parts in named):
                    self.learn(path + name, *(parts[name] for parts in named))


def form_of(value: Any, is_known: Callable[[torch.Tensor], bool]) -> Any:
    """What a trace leaves, without memory: tensors whose values are not known, or that are large, are on `meta`."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and value.numel() <= _KNOWN and is_known(value):
            return value.detach().cpu().clone()
        return torch.empty(tuple(value.shape), dtype=value.dtype, device="meta")
    parts = parts_of(value, objects=holds_tensors(value))
    return value if parts is None else parts.rebuild([form_of(part, is_known) for part in parts.values])


def _rule_of_numbers(first: Any, second: Any, small: Any, large: Any) -> Rule | None:
    is_count = isinstance(first, (int, np.integer))
    if not math.isclose(small, first, rel_tol=1e-6):  # a trace does not know it
        return "sum" if is_count and min(small, large) >= 0 else None
    if first == second == large:
        return "first" if large else None  # nothing may be an index or a count
    if math.isclose(large, first + second, rel_tol=1e-6):
        return "sum"
    if first and first != second:
        return "largest" if large == max(first, second) else "least" if large == min(first, second) else None
    return None


def _rule_of_texts(first: Any, second: Any, small: Any, large: Any) -> Rule | None:
    if small != first:  # a trace does not know it
        return None
    return "first" if first == second == large else "apart" if large != small else None


def _rule_of_lists(first: int, second: int, small: int, large: int) -> Rule | None:
    if small != first or large > small:
        return "items"
    return "parts" if large == second == small else None


def _rule_of_tensors(
    first: torch.Tensor, second: torch.Tensor, small: torch.Tensor, large: torch.Tensor
) -> Rule | None:
    if small.shape != first.shape or large.dim() != small.dim():  # it depends on values
        return None
    growing = [dim for dim in range(small.dim()) if small.shape[dim] != large.shape[dim]]
    if growing:
        return growing[0] if len(growing) == 1 else "apart"
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
    return "sum" if is_count else "fixed"


_ELEMENTS: dict[Rule, tuple[Any, Any]] = {
    "largest": (torch.maximum, np.maximum),
    "least": (torch.minimum, np.minimum),
}


def merged_by(rule: Rule | None, values: Sequence[Any]) -> tuple[Any] | None:
    """Numbers, or tensors of one shape, put together by a rule of numbers; None: it says nothing of these."""
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
