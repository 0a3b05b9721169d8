"""How many samples a batch has, and which of its lists are lists of samples.

A list may be a list of samples (one image or dict for each) or a structure (inputs and labels, each with all samples).
Nothing in it says which, so this is the rule:

1. The batch size is the size of all tensors and arrays along the batch dimension, and lists around them are structure:
   that is what `torch.utils.data.default_collate` makes.
2. A list as long as the batch is a list of samples if it holds no tensors (texts, ids, numbers), or if its items are
   of one kind and their tensors are not all of the batch size (images, dicts of boxes and labels). A tuple that is the
   batch itself is structure, and so is that of a call's arguments. Earlier batches tell what may be either in this
   one: a list that was as long in a batch of another size is structure, one that had tensors for each sample has them
   again, and one that had tensors of all samples has them again where a last batch has fewer.
3. Where no tensor is outside of lists of samples, these say what the batch size is. Where both readings are possible,
   the one whose size the DataLoader is known to have is right; otherwise the first, and a warning says so if a mistake
   is likely. Where neither is possible, or nothing says which, the batch is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.core.wording import counted, listed
from lightning_pfo.strategy.step.batches.nodes import Node, is_alike, node_of
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.structures import num_samples


@dataclass(frozen=True)
class Reading:
    """How a batch is understood.

    Attributes:
        root: The batch.
        size: Its number of samples.
        lists: Paths of lists and the like that hold one item for each sample.
        is_firm: Whether anything but a single list of tensors, which may be contradictory ones as well, says so.
    """

    root: Node
    size: int
    lists: frozenset[str]
    is_firm: bool = True


@dataclass(frozen=True)
class Known:
    """What is known of lists in a batch, which may be as long as their elements are by chance; earlier ones tell.

    Attributes:
        structure: Paths of tuples that are no lists of samples, however long they are.
        lengths: Paths and lengths of lists that were as long in batches of other sizes.
        samples: Paths of lists that had an item for each sample.
        columns: Paths and lengths of lists that had tensors of all samples, and were as long as the batch by chance.
    """

    structure: frozenset[str] = frozenset({"batch"})
    lengths: set[tuple[str, int | None]] = field(default_factory=set)
    samples: set[str] = field(default_factory=set)
    columns: set[tuple[str, int | None]] = field(default_factory=set)

    def are_columns(self, node: Node) -> bool:
        """Whether a list has tensors of all samples again, of which a last batch has less than others had."""
        if (node.path, node.length) not in self.columns or node.path in self.samples or node.length is None:
            return False
        sizes = {child.size for child in node.children}
        return len(sizes) == 1 and 0 < (sizes.pop() or 0) < node.length

    def learn(self, reading: Reading) -> None:
        """Note how a batch was understood."""
        for node in reading.root.all():
            if node.length is not None and node.may_be_samples:
                if node.length != reading.size:
                    self.lengths.add((node.path, node.length))
                elif node.path in reading.lists:
                    self.samples.add(node.path)
                elif node.has_tensors:
                    self.columns.add((node.path, node.length))


def read(batch: Any, batch_dim: int = 0, expected: Collection[int] = (), known: Known | None = None) -> Reading:
    """Find out how many samples a batch has, and where.

    Args:
        batch: The batch.
        batch_dim: The dimension along which tensors have samples.
        expected: Sizes that a DataLoader says its batches have; used where a batch can be understood in two ways.
        known: What is known of batches, to which this one is added; None: nothing.

    Raises:
        BatchError: If sizes contradict each other, or there is none.
    """
    if batch_dim < 0:
        raise BatchError(f"batch_dim counts dimensions from the first, 0, on; got {batch_dim}.")
    structure = (known or Known()).structure
    root = node_of(batch, "batch", batch_dim, structure=structure)
    if not root.has_tensors:  # then an object of another class may be all there is
        root = node_of(batch, "batch", batch_dim, objects=True, structure=structure)
    readings = [_read_as(root, size, expected, known) for size in _candidates(root)]
    possible = [reading for reading in readings if reading is not None]
    if not any(reading.is_firm for reading in possible):
        raise BatchError(_refusal(root, batch_dim))
    reading = _choose(root, possible, expected, () if known is None else known.samples)
    if reading.size < 1:
        raise BatchError(f"A batch has one sample at least; {_named(root, reading.size)} has none.")
    if known is not None:
        known.learn(reading)
    return reading


def read_object(node: Node, size: int, batch_dim: int) -> Reading | None:
    """The reading of an object of another class by its attributes; None unless all its tensors have the batch size."""
    root = node_of(node.value, node.path, batch_dim, objects=True, sliced=False)
    if {leaf.size for leaf in root.sized()} != {size}:
        return None
    return _read_as(root, size) or Reading(root, size, frozenset())


# ---- one reading ----


@dataclass
class _Found:
    """What is found in a batch that is read as having so many samples.

    Attributes:
        size: How many.
        samples: Containers whose items are samples.
        undecided: Those whose parts and items look the same.
        columns_of_tensors: How many of the first have nothing but tensors.
        is_firm: Whether something says that it has so many.
        known: What earlier batches tell.
    """

    size: int
    is_firm: bool
    known: Known
    samples: list[Node] = field(default_factory=list)
    undecided: list[Node] = field(default_factory=list)
    columns_of_tensors: int = 0

    def fits(self, node: Node) -> bool:
        """Look at a part of the batch; returns whether it can have so many samples."""
        if node.size is not None:
            self.is_firm = True
            return node.size == self.size
        is_long = node.length == self.size and (node.path, node.length) not in self.known.lengths
        is_long = is_long and not self.known.are_columns(node)
        if is_long and node.may_be_samples and not _has_columns(node, self.size):
            sizes = {leaf.size for leaf in node.sized()}
            is_known = node.path in self.known.samples
            if not sizes or (is_alike(node) and (is_known or sizes != {self.size} or _have_single_values(node))):
                self.samples.append(node)
                if sizes and _has_tensors_only(node) and not is_known:
                    self.columns_of_tensors += 1
                else:
                    self.is_firm = self.is_firm or is_alike(node)
                return True
            if is_alike(node):
                self.undecided.append(node)
        return all(map(self.fits, node.children))


def _read_as(root: Node, size: int, expected: Collection[int] = (), known: Known | None = None) -> Reading | None:
    """How a batch is understood if it has `size` samples; None if it cannot have so many."""
    found = _Found(size, is_firm=size in expected, known=known or Known())
    if not found.fits(root):
        return None
    lists = {node.path for node in found.samples}
    if not root.has_tensors and not _all_lists_fit(root, size, lists):
        return None
    if any(node.has_tensors for node in found.samples):
        # beside a list of images, dicts that happen to have as many boxes each as there are samples are samples too
        # and so are images, of which columns would have been stacked
        lists.update(each.path for each in found.undecided if not _has_tensors_only(each) or _look_like_images(each))
    elif size > 1:
        for node in found.undecided:
            has_name = _has_tensors_only(node) and node.path.endswith("']")  # a list of [inputs, labels] has none
            if has_name or (node is not root and all(isinstance(child.value, Mapping) for child in node.children)):
                warn_once(
                    f"{node.path} has as many items as the batch has samples ({size}), with tensors of this size: they "
                    f"are taken for tensors of all samples, not for one of each. If each is of one: {_OWN_WAY}"
                )
    return Reading(root, size, frozenset(lists), found.is_firm or found.columns_of_tensors > 1)


def _has_tensors_only(node: Node) -> bool:
    return all(child.size is not None or child.value is None for child in node.children)


def _has_columns(node: Node, size: int) -> bool:
    """Whether there are lists in it that are as long as the batch, rather than being so itself.

    So it is for tuples of lists, and for what `default_collate` makes of texts in tuples: a list of tuples.
    """
    if node.has_tensors or not node.children:
        return False
    if isinstance(node.value, tuple):
        return all(any(inner.length == size for inner in child.all()) for child in node.children)
    return all(isinstance(child.value, tuple) and child.length == size and _is_column(child) for child in node.children)


def _is_column(node: Node) -> bool:
    """Whether items are of one class, as those of a field are in all samples; those of a sample, often, are not."""
    return len(set(map(type, node.value))) == 1


def _all_lists_fit(node: Node, size: int, lists: set[str]) -> bool:
    """Without tensors only lists say what the size is, so all of them have to."""
    if node.path in lists:
        return True
    if node.may_be_samples and not node.children:
        return node.length == size
    return all(_all_lists_fit(child, size, lists) for child in node.children)


# ---- the right one of several ----


def _candidates(root: Node) -> list[int]:
    """Sizes that the batch may have, in the order in which they are met."""
    found: dict[int, None] = {}
    for node in root.all():
        if node.size is not None:
            found[node.size] = None
        if node.length is not None and node.may_be_samples and is_alike(node):
            found[node.length] = None
    return list(found)


def _choose(root: Node, readings: list[Reading], expected: Collection[int], samples: Collection[str]) -> Reading:
    """The right one of several readings, of which one at least is firm; these lists have been ones of samples."""
    firm = [reading for reading in readings if reading.is_firm]
    known = [reading for reading in firm if reading.size in expected]
    tensor_sizes = {leaf.size for leaf in root.sized()}
    by_tensors = next((reading for reading in firm if {reading.size} == tensor_sizes), None)
    if len(known) == 1 and (by_tensors in (None, known[0]) or by_tensors.size % known[0].size):
        return known[0]  # else a collate_fn may have made several samples of each, as patches of an image
    if by_tensors is None:
        if len(firm) == 1:
            return firm[0]
        as_before = [reading for reading in firm if not reading.lists.isdisjoint(samples)]
        if len(as_before) == 1:
            return as_before[0]
        sizes = [reading.size for reading in firm]
        raise BatchError(
            f"A batch has one size, but {listed([f'{_named(root, size)} has {size}' for size in sizes])}: either may "
            f"be the number of samples. {_OWN_WAY}"
        )
    by_lists = {path: reading for reading in readings if reading is not by_tensors for path in reading.lists}
    lists = [node for node in root.all() if node.path in by_lists and node.has_tensors]
    if len({node.length for node in lists}) == 1 and all(map(_have_single_values, lists)):
        return by_lists[lists[0].path]
    # nor does it leave a list of numbers, so one that is as long as a list of tensors has one for each sample
    plain = {node.path for node in root.all() if not node.has_tensors and node.length}
    of_tensors = {node.path for node in lists}
    by_both = [reading for reading in firm if reading.lists & plain and reading.lists & of_tensors]
    if len(by_both) == 1:
        return by_both[0]
    for node in lists[:1]:
        if not _has_tensors_only(node) or _look_like_images(node):
            warn_once(
                f"{node.path} is taken for {counted(len(node.children), 'part')} of a batch of {by_tensors.size} "
                f"samples, as its tensors have this size, not for a list of {node.length} samples. If it is one: "
                f"{_OWN_WAY}"
            )
    return by_tensors


def _have_single_values(node: Node) -> bool:
    """Whether all items have a number, a text or a tensor without dimensions beside tensors: these are of one sample.

    `default_collate` leaves none of them there.
    """
    return all(any(map(_is_single, child.children)) for child in node.children if child.value is not None)


def _is_single(node: Node) -> bool:
    is_number = isinstance(node.value, torch.Tensor) and not node.value.ndim
    return is_number or isinstance(node.value, (int, float, str))


def _look_like_images(node: Node) -> bool:
    shapes = [child.value.shape for child in node.children if isinstance(child.value, (torch.Tensor, np.ndarray))]
    return len(shapes) > 1 and all(len(shape) == 3 and shape[0] in (3, 4) for shape in shapes)


# ---- wording ----

_UNDIVIDED = "With num_microbatches=1 and schedule='gpipe' nothing is divided."
_OWN_WAY = (
    "Say how batches are divided: split_batch=function, which takes a batch and a number of microbatches and returns "
    "them as a list."
)


def _named(root: Node, size: int) -> str:
    return next(node.path for node in root.all() if size in (node.size, node.length))


def _refusal(root: Node, batch_dim: int) -> str:
    dimension = f"dimension {batch_dim}" if batch_dim else "the first dimension"
    by_size: dict[int, str] = {}
    for node in root.all():
        size = node.size
        if not root.has_tensors and node.may_be_samples:
            size = node.length
        if size is not None:
            by_size.setdefault(size, node.path)
    if not by_size:
        return (
            "A batch holds a tensor or array with samples, or a list with an item for each sample; got no tensor, "
            f"array or list in a {type(root.value).__name__}. {_OWN_WAY} {_UNDIVIDED}"
        )
    found = listed([f"{path} has {size}" for size, path in by_size.items()])
    return (
        f"A batch is split along {dimension} of its tensors and arrays, which must be the same for all, got {found}. "
        f"{_other_dimension(root, batch_dim)}What has no samples may be 0-dimensional, a number, or an attribute of "
        f"the module. {_OWN_WAY} {_UNDIVIDED}"
    )


def _other_dimension(root: Node, batch_dim: int) -> str:
    other = 0 if batch_dim else 1
    tensors = [node.value for node in root.sized() if isinstance(node.value, (torch.Tensor, np.ndarray))]
    sizes = {num_samples(tensor, other) for tensor in tensors}
    if len(sizes) != 1 or all(tensor.ndim <= other for tensor in tensors):
        return ""
    return f"With batch_dim={other}, all have {sizes.pop()}: use it if these are the samples. "
