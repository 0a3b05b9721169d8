"""What calls are given and return, taken apart and put together: containers, and objects that hold tensors.

torch knows tuples, lists, dicts and what was registered with it. Dataclasses, batches of graphs, distributions and
other objects with tensors as attributes are taken apart by these attributes, so that no tensor in them goes unseen.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pfo.strategy.parallel import compat

_LEAVES = frozenset({torch.Tensor, nn.Parameter, bool, int, float, str, bytes, type(None), torch.dtype, torch.device})
"""Types of nearly all leaves."""

_CLOSED = (type, torch.Tensor, nn.Module, np.ndarray, types.ModuleType, types.FunctionType, types.MethodType)


@dataclass(frozen=True)
class _Object:
    """How to make an object anew.

    Attributes:
        kind: The name of its class.
        names: Its attributes.
        structure: What puts their values together.
        template: A copy of it, without them.
    """

    kind: str
    names: tuple[str, ...]
    structure: Any
    template: Any = field(repr=False, compare=False)


@dataclass(frozen=True)
class _WithObjects:
    """What puts leaves together, of which some runs are those of objects: position and length, and the object."""

    structure: Any
    objects: tuple[tuple[int, int, _Object], ...]


def tree_flatten(values: Any) -> tuple[list[Any], Any]:
    """All leaves of nested containers and objects, and what `tree_unflatten` takes with them."""
    leaves, structure = compat.tree_flatten(values)
    if _LEAVES.issuperset(map(type, leaves)):
        return leaves, structure
    found: list[Any] = []
    objects = []
    for position, leaf in enumerate(leaves):
        attributes = attributes_of(leaf)
        template = _emptied(leaf, attributes) if attributes else None
        if template is None:
            found.append(leaf)
            continue
        of_object, of_attributes = tree_flatten(list(attributes.values()))
        found += of_object
        made = _Object(type(leaf).__qualname__, tuple(attributes), of_attributes, template)
        objects.append((position, len(of_object), made))
    return found, _WithObjects(structure, tuple(objects)) if objects else structure


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """Put leaves together."""
    leaves = list(leaves)
    if not isinstance(structure, _WithObjects):
        return compat.tree_unflatten(leaves, structure)
    for position, length, of_object in structure.objects:
        values = tree_unflatten(leaves[position : position + length], of_object.structure)
        made = copy.copy(of_object.template)
        for name, value in zip(of_object.names, values, strict=True):
            object.__setattr__(made, name, value)
        leaves[position : position + length] = [made]
    return compat.tree_unflatten(leaves, structure.structure)


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


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that has tensors as such, or containers of tensors; nothing of other values."""
    if type(value) in _LEAVES or isinstance(value, _CLOSED):
        return {}
    own = dict(getattr(value, "__dict__", {}))
    if is_dataclass(value):
        own |= {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    return own if any(map(_has_tensor, own.values())) else {}


def _has_tensor(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(part, torch.Tensor) for part in parts)


def _emptied(value: Any, names: Iterable[str]) -> Any:
    """A copy without the values of its attributes; None if it cannot be copied so."""
    try:
        empty = copy.copy(value)
        for name in names:
            object.__setattr__(empty, name, None)
    except Exception:  # objects decide themselves how they are copied
        return None
    return empty if empty is not value and type(empty) is type(value) else None


def rewrite(target: Any, source: Any) -> None:
    """Give containers and objects the content of others that were made from the same ones; they stay who they are.

    Args:
        target: What is changed.
        source: What it shall hold.
    """
    if isinstance(target, dict):
        for key in [key for key in target if key not in source]:
            del target[key]
        for key, value in source.items():
            if key not in target or not _rewritten(target[key], value):
                target[key] = value
    elif isinstance(target, list) and len(target) != len(source):
        target[:] = source
    elif isinstance(target, (list, tuple)):
        for index, (old, new) in enumerate(zip(target, source, strict=True)):
            if not _rewritten(old, new) and isinstance(target, list):
                target[index] = new
    elif attributes := attributes_of(source):
        for name, value in attributes.items():
            if not _rewritten(getattr(target, name, None), value):
                object.__setattr__(target, name, value)


def _rewritten(old: Any, new: Any) -> bool:
    """Whether nothing has to be put in the place of `old`, as its content is that of `new` now."""
    if old is new:
        return True
    if type(old) is not type(new) or not (isinstance(old, (dict, list, tuple)) or attributes_of(new)):
        return False
    if isinstance(old, tuple):
        return len(old) == len(new) and all([_rewritten(a, b) for a, b in zip(old, new, strict=True)])
    rewrite(old, new)
    return True
