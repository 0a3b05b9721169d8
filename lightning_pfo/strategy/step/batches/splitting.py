"""Splitting a batch into microbatches; `reading` says how a batch is understood."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.model.tracing.forms.parts import found_in
from lightning_pfo.strategy.step.batches.nodes import Node
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.reading import Known, Reading, read, read_object
from lightning_pfo.strategy.step.batches.structures import (
    PLAIN,
    has_samples,
    holds_tensors,
    num_samples,
    take_samples,
)

SplitBatch = Callable[[Any, int], Sequence[Any]]
"""A user's way of splitting: takes a batch and the number of microbatches wanted, and returns them."""


@dataclass(frozen=True)
class Microbatches(Sequence[Any]):
    """The microbatches of a batch, in order.

    Attributes:
        parts: The microbatches, each in the form of the batch.
        sizes: How many samples each holds.
    """

    parts: tuple[Any, ...]
    sizes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Microbatches: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Microbatches(self.parts[index], self.sizes[index])
        return self.parts[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)

    @property
    def size(self) -> int:
        """Samples of the batch."""
        return sum(self.sizes)


def even_sizes(size: int, number: int) -> tuple[int, ...]:
    """Divide `size` samples into `number` parts (fewer for fewer samples) that differ by one at most, larger first."""
    number = min(size, number)
    return tuple(size // number + (index < size % number) for index in range(number))


def split_batch(
    batch: Any,
    num_microbatches: int,
    *,
    batch_dim: int = 0,
    split: SplitBatch | None = None,
    expected: Collection[int] = (),
    known: Known | None = None,
) -> Microbatches:
    """Split a batch into microbatches whose sizes differ by one at most, larger ones first.

    Tensors and arrays are split along the batch dimension (tensors as views, without a copy), lists with an item for
    each sample by items; what has no samples is given to every microbatch as it is. Containers (mappings, lists,
    tuples, named tuples, dataclasses) keep their types. A batch of fewer samples than `num_microbatches` gives
    microbatches of one sample each.

    Args:
        batch: The batch.
        num_microbatches: How many are wanted.
        batch_dim: The dimension along which tensors have samples; tensors of fewer dimensions have them along the last.
        split: The user's own way, in place of this one.
        expected: Sizes that a DataLoader says its batches have; see `reading`.
        known: What earlier batches tell; see there.

    Raises:
        BatchError: If the batch cannot be split: sizes contradict each other or there are none, or `split` fails.
    """
    if num_microbatches < 1:
        raise BatchError(f"A batch is split into 1 microbatch or more; got num_microbatches={num_microbatches}.")
    if split is not None:
        return _split_by(split, batch, num_microbatches, batch_dim)
    if num_microbatches == 1:  # whatever it is
        return Microbatches((batch,), (size_or_one(batch, batch_dim, expected, known),))
    reading = read(batch, batch_dim, expected, known)
    sizes = even_sizes(reading.size, num_microbatches)
    if len(sizes) == 1:
        return Microbatches((batch,), sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    ranges = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    parts = tuple(_take(reading.root, reading, start, stop, batch_dim) for start, stop in ranges)
    return Microbatches(parts, sizes)


def batch_size_of(batch: Any, batch_dim: int = 0, expected: Collection[int] = (), known: Known | None = None) -> int:
    """The number of samples of a batch; arguments and errors as for `split_batch`."""
    return read(batch, batch_dim, expected, known).size


def first_samples(
    batch: Any, number: int, batch_dim: int = 0, expected: Collection[int] = (), known: Known | None = None
) -> Any:
    """The first `number` samples of a batch, in the form in which `split_batch` gives them."""
    reading = read(batch, batch_dim, expected, known)
    return _take(reading.root, reading, 0, number, batch_dim)


def size_or_one(batch: Any, batch_dim: int, expected: Collection[int] = (), known: Known | None = None) -> int:
    """The number of samples of a batch, or 1 if it cannot be divided."""
    try:
        return batch_size_of(batch, batch_dim, expected, known)
    except BatchError:
        return 1


def _split_by(split: SplitBatch, batch: Any, num_microbatches: int, batch_dim: int) -> Microbatches:
    name = f"split_batch={getattr(split, '__qualname__', split)}"
    try:
        found = split(batch, num_microbatches)
    except Exception as error:
        raise BatchError(
            f"{name} raised {type(error).__name__}: {error} It was called with a {type(batch).__name__} and "
            f"num_microbatches={num_microbatches}, and returns a list of microbatches."
        ) from error
    if isinstance(found, Microbatches):
        parts, sizes = found.parts, found.sizes
    elif isinstance(found, (list, tuple)):
        parts = tuple(found)
        sizes = tuple(size_or_one(part, batch_dim) for part in parts)
    else:
        raise BatchError(f"{name} returns a list or tuple of microbatches; got a {type(found).__name__}.")
    if not 1 <= len(parts) <= num_microbatches or len(parts) != len(sizes):
        raise BatchError(
            f"{name} returns num_microbatches={num_microbatches} microbatches, or fewer of a smaller batch; got "
            f"{len(parts)}" + (f" and {len(sizes)} sizes." if len(parts) != len(sizes) else ".")
        )
    return Microbatches(parts, sizes)


def _take(node: Node, reading: Reading, start: int, stop: int, batch_dim: int) -> Any:
    value = node.value
    if node.size is not None:
        return take_samples(value, start, stop, batch_dim)
    if node.path in reading.lists:
        return _items(node, start, stop, batch_dim)
    if node.parts is None:
        return _take_from_object(node, reading.size, start, stop, batch_dim)
    taken = [_take(child, reading, start, stop, batch_dim) for child in node.children]
    if all(new is old for new, old in zip(taken, node.parts.values, strict=True)):
        return value
    return node.parts.rebuild(taken)


def _items(node: Node, start: int, stop: int, batch_dim: int) -> Any:
    """A slice; of what knows no slices that are like itself, an object with sliced attributes or a list of items."""
    value = node.value
    try:
        taken = value[start:stop]
        if len(taken) == stop - start and (isinstance(value, Sequence) or isinstance(taken, type(value))):
            return taken
    except Exception:  # a class of the user's may raise anything for a slice
        pass
    reading = read_object(node, node.length or 0, batch_dim)
    if reading is not None:
        return _take(reading.root, reading, start, stop, batch_dim)
    return [value[index] for index in range(start, stop)]


def _take_from_object(node: Node, size: int, start: int, stop: int, batch_dim: int) -> Any:
    """Split an object of another class by its attributes, if all its tensors have the batch size."""
    value = node.value
    if type(value) in PLAIN:
        return value
    reading = None if node.is_around or not holds_tensors(value) else read_object(node, size, batch_dim)
    if reading is not None:
        return _take(reading.root, reading, start, stop, batch_dim)
    if any(num_samples(each, batch_dim) == size for each in found_in(value, has_samples)):
        warn_once(
            f"{node.path} is a {type(value).__name__}, of whose tensors only some have the batch size, or which can be "
            f"called or leads back to itself, so every microbatch gets the whole of it. Give it __len__ and a "
            f"__getitem__ for slices, or use split_batch=."
        )
    return value
