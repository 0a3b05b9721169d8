"""Tensors in what cannot be taken apart: sets, iterators, other objects of C. No other stage could get them.

Functions that a layer returns with tensors in them (hyper-connections, a normalization that is undone later) become
objects that are called alike, which can be taken apart.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import FakeTensorMode
from lightning_pfo.strategy.model.tracing.forms.parts import Opened, cells_of, defaults_of, is_cache

_NOT_INTO = (type, types.ModuleType, types.CodeType, types.FrameType, nn.Module, str, bytes, int, float)
_DEEPEST = 6
_MOST = 300


def opened(value: Any, _within: frozenset[int] = frozenset()) -> Any:
    """What a layer returns, with objects in place of functions that have tensors in them.

    Functions are found in tuples, lists and dicts, in partial functions and in the closures of each other.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        now = [opened(each, _within) for each in value]
        return value if all(map(is_, now, value)) else kind(now)
    if kind is dict:
        now = [opened(each, _within) for each in value.values()]
        return value if all(map(is_, now, value.values())) else dict(zip(value, now, strict=True))
    if kind is functools.partial:
        function, args, kwargs = now = opened(parts := (value.func, value.args, value.keywords), _within)
        return value if now is parts else functools.partial(function, *args, **kwargs)
    if kind is types.FunctionType and id(value) not in _within and (held := _held_by(value)):
        within = _within | {id(value)}
        return Opened(value, {name: opened(each, within) for name, each in held.items()})
    return value


def _held_by(function: types.FunctionType) -> dict[str | int, Any]:
    """What has tensors in a function, and numbers beside these, which it may change; see `cells_of`, `defaults_of`."""
    cells = {name: cell.cell_contents for name, cell in cells_of(function).items() if cell != types.CellType()}
    found = {**cells, **defaults_of(function)}
    tensors = {name: value for name, value in found.items() if _is_open(value) and hides_tensor([value])}
    return tensors and tensors | {name: value for name, value in found.items() if type(value) in (int, float, bool)}


def _is_open(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, torch.Tensor) or kind in (tuple, list, dict, functools.partial, types.FunctionType)


class HidingError(ConfigurationError):
    """What ends a trace for good: a layer hides tensors, so that no other stage could get them, or the like."""


def hiding(leaves: Iterable[Any], without: Iterable[Any] = ()) -> str:
    """What the first leaf that hides a tensor is; none: "".

    Args:
        leaves: Of nested containers and objects.
        without: Leaves that are not asked.
    """
    known = set(map(id, without))
    return next((_told(leaf) for leaf in leaves if id(leaf) not in known and hides_tensor(leaf)), "")


def _told(leaf: Any) -> str:
    is_plain = isinstance(leaf, torch.Tensor) and not leaf.is_nested
    return "the attributes of a tensor" if is_plain else f"a {type(leaf).__name__!r}"


def hides_tensor(leaf: Any) -> bool:
    """Whether there are tensors in something that has not been taken apart, or in attributes of a tensor."""
    waiting: list[Any] = _attributes(leaf) if isinstance(leaf, torch.Tensor) else [leaf]
    seen: set[int] = set()
    for _ in range(_DEEPEST if waiting else 0):
        inner: list[Any] = []
        for each in waiting:
            if isinstance(each, torch.Tensor):
                return True
            if id(each) not in seen and len(seen) < _MOST and not isinstance(each, _NOT_INTO):
                seen.add(id(each))
                inner += _contents(each)
        waiting = inner
    return False


def _attributes(tensor: torch.Tensor) -> list[Any]:
    """What somebody has set as attributes of a tensor, or a nested one consists of."""
    if isinstance(tensor, nn.Parameter) or (hasattr(tensor, "__tensor_flatten__") and not tensor.is_nested):
        return []
    return [value for name, value in vars(tensor).items() if name not in _of_forms()]


@functools.cache
def _of_forms() -> frozenset[str]:
    """The attributes of tensors without values."""
    with FakeTensorMode():
        return frozenset(vars(torch.empty(())))


def _contents(value: Any) -> list[Any]:
    kind: Any = type(value)
    if is_cache(kind):
        return []
    if isinstance(value, types.FunctionType):  # it refers to all variables of its module too
        return [*(value.__closure__ or ()), *(value.__defaults__ or ())]
    return gc.get_referents(value)


def refuse_hidden(name: str, kind: str) -> None:
    """Refuse what a layer returns, or writes into what it is given.

    Args:
        name: The layer's.
        kind: What hides tensors, as `hiding` finds it.

    Raises:
        HidingError: If there is one.
    """
    if kind:
        raise HidingError(
            f"{name!r} returns tensors inside of {kind}, or writes them into one that it is given; they cannot be "
            f"taken out of it to be sent to other stages. Let it return tensors, or a tuple, list, dict or dataclass "
            f"of them."
        )
