"""State with a row for each sample that a step leaves for its next batch, as that of a recurrent network.

One device finds the rows of the whole batch, and so does each microbatch: the step may need all of them, as negatives
say. Where it does not run so, or comes to something else than on one device, since it takes the rows of its own
samples, each microbatch is given those from then on. So it is with what a hook has made for the first batch.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.step.batches.structures import PLAIN, leaves_of, taken_apart

Dimensions = dict[str, int]
"""The dimension in which tensors have rows, by the place of each in a value."""


@dataclass(frozen=True)
class Rows:
    """A value with rows, where it is.

    Attributes:
        holder: What has it.
        key: As what.
        value: The value.
        dimensions: Where it has rows.
    """

    holder: MutableMapping[Any, Any]
    key: Any
    value: Any
    dimensions: Dimensions


class RowsLeft:
    """What the latest batch has left in rows.

    Attributes:
        are_divided: Whether microbatches are given their own.
    """

    def __init__(self) -> None:
        self._rows: list[Rows] = []
        self._guessed: set[str] = set()
        self.are_divided = False

    def note(self, rows: Sequence[Rows]) -> None:
        """A batch has left these."""
        if rows or not self.are_divided:
            self._rows = list(rows)

    def can_be_divided(self) -> bool:
        """Whether there are rows that all microbatches find."""
        return not self.are_divided and any(rows.holder.get(rows.key) is rows.value for rows in self._rows)

    def divide(self) -> bool:
        """Let microbatches have their own rows from now on; False: they have, or there are none."""
        is_new = self.can_be_divided()
        self.are_divided = self.are_divided or is_new
        return is_new

    def guess(self, kind: str, owner: nn.Module, number: int) -> bool:
        """Do so with what the module has itself, before any batch has left something; False: there is nothing.

        Args:
            kind: Which step fails; of each it is tried once.
            owner: The user's module.
            number: How many samples the batch has.
        """
        if self.are_divided or self._rows or kind in self._guessed:
            return False
        self._guessed.add(kind)
        for holder in (vars(owner), tensors_of(owner).buffers):
            for key, value in holder.items():
                if not key.startswith("_") and (dimensions := _dimensions_of(value, number)):
                    self._rows.append(Rows(holder, key, value, dimensions))
        self.are_divided = bool(self._rows)
        return self.are_divided

    def give_up(self) -> None:
        """Let them find all again."""
        self._rows, self.are_divided = [], False

    @contextmanager
    def of_samples(self, start: int, number: int, of_all: int) -> Iterator[None]:
        """Let some samples find their own rows while the context is open; what the step sets itself stays.

        Args:
            start: The first of them.
            number: How many they are.
            of_all: How many the batch has.
        """
        given: list[tuple[Rows, Any]] = []
        for known in self._rows:
            rows = replace(known, value=known.holder.get(known.key))  # a hook may have begun anew
            if _have(rows, of_all):
                rows.holder[rows.key] = part = _part_of(rows, start, number)
                given.append((rows, part))
        try:
            yield
        finally:
            for rows, part in given:
                if rows.holder.get(rows.key) is part:
                    rows.holder[rows.key] = rows.value


def dimensions_of_rows(values: Sequence[Any], merged: Any, sizes: Sequence[int]) -> Dimensions:
    """Where a value has rows, given what each microbatch has left and what that has become together.

    Args:
        values: What each has left.
        merged: All of it.
        sizes: How many samples each microbatch has.
    """
    of_parts = [dict(leaves_of(value, "")) for value in values]
    found: Dimensions = {}
    for place, leaf in leaves_of(merged, ""):
        parts = [leaves.get(place) for leaves in of_parts]
        if not isinstance(leaf, torch.Tensor) or not all(isinstance(part, torch.Tensor) for part in parts):
            continue
        shapes = [tuple(part.shape) for part in parts if part is not None]
        for dim, number in enumerate(leaf.shape):
            expected = [(*leaf.shape[:dim], size, *leaf.shape[dim + 1 :]) for size in sizes]
            if number == sum(sizes) and shapes == expected:
                found[place] = dim
    return found


def _have(rows: Rows, number: int) -> bool:
    leaves = dict(leaves_of(rows.value, ""))

    def has(place: str, dim: int) -> bool:
        leaf = leaves.get(place)
        return isinstance(leaf, torch.Tensor) and leaf.dim() > dim and leaf.shape[dim] == number

    return all(has(*each) for each in rows.dimensions.items())


def _dimensions_of(value: Any, number: int) -> Dimensions:
    """Where a value may have so many rows: in the first dimension of this size."""
    tensors = {place: leaf for place, leaf in leaves_of(value, "") if isinstance(leaf, torch.Tensor)}
    return {place: tuple(leaf.shape).index(number) for place, leaf in tensors.items() if number in leaf.shape}


def _part_of(rows: Rows, start: int, number: int) -> Any:
    def part(value: Any, place: str) -> Any:
        if place in rows.dimensions:
            return value.narrow(rows.dimensions[place], start, number)
        parts = None if type(value) in PLAIN else taken_apart(value)
        if parts is None:
            return value
        return parts.rebuild([part(v, place + name) for name, v in zip(parts.names, parts.values, strict=True)])

    return part(rows.value, "")
