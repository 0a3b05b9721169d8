"""What calls are given and return, taken apart and put together: containers, and objects that hold tensors.

torch knows tuples, lists, dicts and what was registered with it. Dataclasses, batches of graphs, distributions and
other objects with tensors as attributes are taken apart by these attributes, so that no tensor in them goes unseen.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat import tensors
from lightning_pfo.strategy.model.tracing.forms.parts import Parts, attributes_of, holds_tensor, is_open, parts_of

_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""Types of nearly all leaves."""


_STRUCTURES: dict[Any, Any] = {}
"""What puts leaves together, by how they are nested in tuples, lists and dicts: torch takes long to find it."""
_KEYS = frozenset({str, int})
_MOST_STRUCTURES = 1024


def _shape(values: Any, leaves: list[Any]) -> Any:
    """How leaves are nested, which are added to a list; None: not in tuples, lists and dicts alone."""
    kind = type(values)
    if kind in _LEAVES or isinstance(values, torch.Tensor):
        leaves.append(values)
        return 0
    if kind is dict and _KEYS.issuperset(map(type, values)):
        found: list[Any] = [kind, tuple(values)]
        values = values.values()
    elif kind is tuple or kind is list:
        found = [kind]
    else:
        return None
    for value in values:
        shape = _shape(value, leaves)
        if shape is None:
            return None
        found.append(shape)
    return tuple(found)


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


@dataclass(frozen=True)
class _Object:
    """How to make an object anew.

    Attributes:
        parts: What it is made of.
        structure: What puts the values of these together.
    """

    parts: Parts
    structure: Any


@dataclass(frozen=True)
class _WithObjects:
    """What puts leaves together, of which some runs are those of objects: position and length, and the object."""

    structure: Any
    objects: tuple[tuple[int, int, _Object], ...]


def tree_flatten(values: Any, _around: Sequence[Any] = ()) -> tuple[list[Any], Any]:
    """All leaves of nested containers and objects, and what `tree_unflatten` takes with them."""
    leaves: list[Any] = []
    shape = _shape(values, leaves)
    if shape is not None and (structure := _STRUCTURES.get(shape)) is not None:
        return leaves, structure
    by_shape = leaves
    leaves, structure = tensors.tree_flatten(values)
    if shape is not None and _are_same(by_shape, leaves):
        _STRUCTURES[shape] = structure
        if len(_STRUCTURES) > _MOST_STRUCTURES:
            _STRUCTURES.clear()
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, structure
    found: list[Any] = []
    objects = []
    for position, leaf in enumerate(leaves):
        is_tensor = type(leaf) in _LEAVES or isinstance(leaf, torch.Tensor)
        apart = None if is_tensor else parts_of(leaf, _around)
        if apart is None:
            found.append(leaf)
            continue
        parts, of_parts = apart
        of_object, of_values = tree_flatten(of_parts, (*_around, leaf))
        found += of_object
        objects.append((position, len(of_object), _Object(parts, of_values)))
    return found, _WithObjects(structure, tuple(objects)) if objects else structure


def tree_unflatten(leaves: Iterable[Any], structure: Any, _around: Sequence[Any] = ()) -> Any:
    """Put leaves together."""
    leaves = list(leaves)
    if not isinstance(structure, _WithObjects):
        return tensors.tree_unflatten(leaves, structure)
    for position, length, of_object in structure.objects:
        made = of_object.parts.begin()
        values = tree_unflatten(leaves[position : position + length], of_object.structure, (*_around, made))
        leaves[position : position + length] = [of_object.parts.finish(made, values, _around)]
    return tensors.tree_unflatten(leaves, structure.structure)


def tree_leaves(values: Any) -> list[Any]:
    """All leaves of nested containers and objects."""
    return tree_flatten(values)[0]


def tree_map_only(kind: type, function: Callable[[Any], Any], values: Any) -> Any:
    """Nested containers and objects with other leaves in place of those of a type."""
    if isinstance(values, torch.Tensor):  # nearly always, and many times as fast
        return function(values) if isinstance(values, kind) else values
    leaves, structure = tree_flatten(values)
    if not any(isinstance(leaf, kind) for leaf in leaves):
        return values
    return tree_unflatten([function(leaf) if isinstance(leaf, kind) else leaf for leaf in leaves], structure)


def change_attributes(values: Any, change: Callable[[Any], Any]) -> None:
    """Change the attributes of an object that holds tensors; it stays who it is.

    Args:
        values: The object, or anything else, which stays as it is.
        change: What is to stand in the place of an attribute.
    """
    for name, value in attributes_of(values).items() if is_open(values) and holds_tensor(values) else ():
        if (now := change(value)) is not value:
            object.__setattr__(values, name, now)


def rewrite(target: Any, source: Any, _done: frozenset[int] = frozenset()) -> None:
    """Give containers and objects the content of others that were made from the same ones; they stay who they are.

    Args:
        target: What is changed.
        source: What it shall hold.
    """
    done = _done | {id(source)}
    if isinstance(target, dict):
        for key in [key for key in target if key not in source]:
            del target[key]
        for key, value in source.items():
            if key not in target or not _rewritten(target[key], value, done):
                target[key] = value
    elif isinstance(target, (list, deque)) and len(target) != len(source):
        target.clear()
        target.extend(source)
    elif isinstance(target, (list, tuple, deque)):
        for index, (old, new) in enumerate(zip(target, source, strict=True)):
            if not _rewritten(old, new, done) and not isinstance(target, tuple):
                target[index] = new
    if type(target) in _CONTAINERS or not (is_open(source) and (holds_tensor(source) or holds_tensor(target))):
        return
    own, new_ones = attributes_of(target), attributes_of(source)
    for name in own.keys() - new_ones.keys():
        object.__delattr__(target, name)
    for name, value in new_ones.items():
        if not _rewritten(own.get(name), value, done):
            object.__setattr__(target, name, value)


_CONTAINERS = (dict, list, tuple, deque)


def _rewritten(old: Any, new: Any, done: frozenset[int]) -> bool:
    """Whether nothing has to be put in the place of `old`, as its content is that of `new` now, or becomes so."""
    if old is new or id(new() if isinstance(new, weakref.ref) else new) in done:
        return True
    if type(old) is not type(new) or isinstance(new, torch.Tensor):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all([_rewritten(a, b, done) for a, b in zip(old, new, strict=True)])
    if not (isinstance(old, (dict, list, deque)) or (attributes_of(new) and is_open(new) and holds_tensor(new))):
        return False
    rewrite(old, new, done)
    return True
