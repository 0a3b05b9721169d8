"""Anything that a step leaves behind, taken apart: tensors, numbers, and the rest, which hardly ever changes.

What does not change is not sent again, tensors are sent as they are, and numbers go along with the all-reduce that a
step ends with.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import in_memory, tree_leaves, tree_map
from lightning_pfo.strategy.model.tracing.placeholders import check_known
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.structures import PLAIN

_STREAMS = ("stdout", "stderr")
_EXACT = 2**53
"""Up to here float64 holds every integer."""


@dataclass(frozen=True)
class _Number:
    """Where a number belongs, and what it is: the dtype of a tensor, or a Python type."""

    kind: Any


@dataclass(frozen=True)
class _Tensor:
    """Where a tensor belongs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_on_cpu: bool


@dataclass(frozen=True)
class _Stream:
    """Stands for `sys.stdout` or `sys.stderr`, of which each rank has its own."""

    name: str


class Unsent(Enum):
    """Stands for what an item of a dict was set to, or an attribute, where that could not be sent."""

    HERE = 0


_LEAVES = (torch.Tensor, *PLAIN, _Number, _Tensor, _Stream)


@dataclass
class Parcel:
    """A value taken apart.

    Attributes:
        outline: The value without its tensors and numbers, pickled.
        numbers: 0-dimensional tensors and Python numbers.
        tensors: Other tensors, contiguous.
    """

    outline: bytes
    numbers: list[Any] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)


def pack(value: Any, device: torch.device | None) -> Parcel:
    """Take a value apart.

    What cannot be pickled is left out, and a warning names its type.

    Args:
        value: Containers, tensors, numbers and other objects.
        device: Where numbers are sent from; other devices are not read. None: there are no numbers apart.

    Raises:
        DeviationError: If a tensor has no values here.
        ConfigurationError: If a container in it is of a class that other processes do not find.
    """
    parcel = Parcel(b"")

    def mark(leaf: Any) -> Any:
        is_exact = type(leaf) is float or (type(leaf) is int and abs(leaf) < _EXACT)
        if is_exact and device is not None and device.type == "cpu":
            parcel.numbers.append(leaf)
            return _Number(type(leaf))
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not leaf.is_nested:
            check_known(leaf)
            leaf = leaf.detach()
            if leaf.dim() == 0 and leaf.is_floating_point() and leaf.device == device:
                parcel.numbers.append(leaf)
                return _Number(leaf.dtype)
            parcel.tensors.append(in_memory(leaf))
            return _Tensor(tuple(leaf.shape), leaf.dtype, leaf.device.type == "cpu")
        streams = [name for name in _STREAMS if leaf is getattr(sys, name)]
        return _Stream(streams[0]) if streams else leaf

    marked = _mapped(mark, value)
    try:
        parcel.outline = pickle.dumps(marked)
    except Exception:  # anything may be among the leaves
        marked = _mapped(_sendable, marked)
        try:
            parcel.outline = pickle.dumps(marked)
        except (pickle.PicklingError, AttributeError) as error:  # such as a named tuple of a class made in a function
            raise ConfigurationError(
                f"What a step returns or leaves behind is sent to other ranks, where its classes are looked for by "
                f"name: define them at the top of a module, or use a dict. {error}"
            ) from error
    return parcel


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """A value with each leaf changed, as torch's `tree_map`, which takes several times as long for what most are."""
    kind = type(value)
    if kind is dict:
        return {key: _mapped(change, part) for key, part in value.items()}
    if kind is list or kind is tuple:
        return kind(_mapped(change, part) for part in value)
    return change(value) if issubclass(kind, _LEAVES) else tree_map(change, value)


def _sendable(leaf: Any) -> Any:
    try:
        pickle.dumps(leaf)
    except Exception as error:
        warn_once(
            f"A step has left a {type(leaf).__name__} behind that other ranks do not get, as it cannot be pickled "
            f"({error}); they have None instead, or in a dict nothing."
        )
        return Unsent.HERE
    return leaf


def _without_unsent(value: Any) -> Any:
    """A value with None in place of what could not be sent, but for changes, of which who makes them decides."""
    if type(value) is tuple and value[1:] and value[1] is Unsent.HERE and value[0] == "set":
        return value
    if type(value) is dict:
        return {key: _without_unsent(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_without_unsent, value))
    return tree_map(lambda leaf: None if leaf is Unsent.HERE else leaf, value)


def forms_of(outline: bytes) -> tuple[int, list[_Tensor]]:
    """How many numbers a value has, and the forms of its tensors."""
    marks = tree_leaves(pickle.loads(outline))  # made by `pack` on another rank of this run
    return sum(isinstance(mark, _Number) for mark in marks), [mark for mark in marks if isinstance(mark, _Tensor)]


def unpack(outline: bytes, numbers: torch.Tensor, tensors: list[torch.Tensor], device: torch.device) -> Any:
    """Put a value together again.

    Args:
        outline: The value without tensors and numbers.
        numbers: The numbers, as float64.
        tensors: The tensors.
        device: Where its tensors go, except those that were on the CPU.
    """
    single = iter(numbers.unbind())
    several = iter(tensors)

    def put(mark: Any) -> Any:
        if isinstance(mark, _Number):
            number = next(single)
            return number.to(mark.kind) if isinstance(mark.kind, torch.dtype) else mark.kind(number)
        if isinstance(mark, _Tensor):
            return next(several).to("cpu" if mark.is_on_cpu else device)
        return getattr(sys, mark.name) if isinstance(mark, _Stream) else mark

    value = _mapped(put, pickle.loads(outline))
    return _without_unsent(value) if Unsent.__name__.encode() in outline else value
