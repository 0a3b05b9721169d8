"""A batch as a tree, in which everything has a path and, where it may hold samples, their number."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.step.batches.structures import (
    PLAIN,
    Parts,
    has_samples,
    holds_tensors,
    num_samples,
    parts_of,
)


@dataclass(frozen=True)
class Node:
    """A batch or a part of it.

    Attributes:
        path: Where it is, such as `batch['x'][0]`.
        value: What it is.
        size: Samples it holds as a tensor or the like; None otherwise, and for what has no dimension.
        parts: How to take it apart, if it is a container.
        children: Nodes of the parts.
        length: As a list of samples it would have so many; None if it cannot be one.
        is_around: Whether it is a container around itself, which is not taken apart again.
    """

    path: str
    value: Any
    size: int | None = None
    parts: Parts | None = None
    children: list[Node] = field(default_factory=list)
    length: int | None = None
    is_around: bool = False

    def sized(self) -> Iterator[Node]:
        """The tensors and the like in it."""
        if self.size is not None:
            yield self
        for child in self.children:
            yield from child.sized()

    def all(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.all()

    @property
    def may_be_samples(self) -> bool:
        """Whether its items, rather than its parts, may be samples."""
        return self.length is not None and (self.parts is None or isinstance(self.value, (list, tuple)))

    @property
    def has_tensors(self) -> bool:
        """Whether there are any."""
        return next(self.sized(), None) is not None


def node_of(
    value: Any,
    path: str,
    batch_dim: int,
    *,
    objects: bool = False,
    sliced: bool = True,
    structure: Collection[str] = ("batch",),
    around: frozenset[int] = frozenset(),
) -> Node:
    """The tree of a batch, or of a part of it.

    Args:
        value: What it is.
        path: Where it is.
        batch_dim: The dimension along which tensors have samples.
        objects: Whether objects with tensors among their attributes are containers.
        sliced: Whether those that can be sliced are none.
        structure: Paths of tuples that are no lists of samples, however long they are.
        around: Identities of the containers around it, as one may contain itself.
    """
    if type(value) in PLAIN or id(value) in around:
        return Node(path, value, is_around=id(value) in around)
    if has_samples(value):
        return Node(path, value, size=num_samples(value, batch_dim))
    length = None if isinstance(value, tuple) and path in structure else _length_of(value)
    if isinstance(value, (list, tuple)) and set(map(type, value)) <= PLAIN:  # of texts there may be thousands
        return Node(path, value, length=length)
    parts = parts_of(value, objects=objects and not (sliced and length is not None) and holds_tensors(value))
    if parts is None:
        return Node(path, value, length=length)
    inside = around | {id(value)}
    children = [
        node_of(part, path + name, batch_dim, objects=objects, structure=structure, around=inside)
        for name, part in zip(parts.names, parts.values, strict=True)
    ]
    return Node(path, value, parts=parts, children=children, length=length)


def _length_of(value: Any) -> int | None:
    """The length of what may have an item for each sample: lists, and objects that can be sliced."""
    cls = type(value)
    if (
        isinstance(value, (str, bytes, type, dict, torch.Size, torch.nn.Module))
        or hasattr(cls, "keys")
        or hasattr(value, "_fields")
    ):
        return None
    if not hasattr(cls, "__len__") or not hasattr(cls, "__getitem__"):
        return None
    try:
        return len(value)
    except Exception:  # a DataLoader of a stream, and the like
        return None


def is_alike(node: Node) -> bool:
    """Whether all items are of one kind, as samples are, and inputs and labels mostly are not."""
    kinds = _kinds_in(node)
    if len(kinds) <= 1:
        return True
    if not _are_lists(kinds):
        return False
    of_items: list[frozenset[Any]] = sorted((kind[1] for kind in kinds), key=len)
    return all(each <= of_items[-1] and _are_lists(of_items[-1] - each) for each in of_items)  # some may be empty


def _are_lists(kinds: frozenset[Any]) -> bool:
    return all(isinstance(kind, tuple) and kind[0] == "list" for kind in kinds)


def _kinds_in(node: Node) -> frozenset[Any]:
    if isinstance(node.value, (list, tuple)) and not node.children:
        types = set(map(type, node.value)) - {type(None)}
        return frozenset("number" if cls in (bool, int, float) else cls for cls in types)
    return frozenset(kind for kind in map(_kind, node.children) if kind is not None)


def _kind(node: Node) -> Any:
    value = node.value
    if value is None:
        return None
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return ("tensor", str(value.dtype), value.ndim)
    if isinstance(value, (list, tuple)):
        kinds = _kinds_in(node)
        return ("list", kinds) if kinds else None
    return "number" if isinstance(value, (int, float)) else type(value)
