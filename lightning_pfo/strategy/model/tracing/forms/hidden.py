"""Tensors in what cannot be taken apart: sets, functions, iterators. No other stage could get them."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.forms.parts import is_cache

_NOT_INTO = (type, types.ModuleType, types.CodeType, types.FrameType, nn.Module, str, bytes, int, float)
_DEEPEST = 6
_MOST = 300


class HidingError(ConfigurationError):
    """What ends a trace for good: a layer hides tensors, so that no other stage could get them, or the like."""


def hiding(leaves: Iterable[Any], without: Iterable[Any] = ()) -> str:
    """The name of the class of the first leaf that hides a tensor; none: "".

    Args:
        leaves: Of nested containers and objects.
        without: Leaves that are not asked.
    """
    known = set(map(id, without))
    return next((type(leaf).__name__ for leaf in leaves if id(leaf) not in known and hides_tensor(leaf)), "")


def hides_tensor(leaf: Any) -> bool:
    """Whether there are tensors in something that is none itself, and that has not been taken apart."""
    waiting: list[Any] = [leaf]
    seen: set[int] = set()
    for _ in range(0 if isinstance(leaf, torch.Tensor) else _DEEPEST):
        inner: list[Any] = []
        for each in waiting:
            if isinstance(each, torch.Tensor):
                return True
            if id(each) not in seen and len(seen) < _MOST and not isinstance(each, _NOT_INTO):
                seen.add(id(each))
                inner += _contents(each)
        waiting = inner
    return False


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
        kind: The name of a class, as `hiding` finds it.

    Raises:
        HidingError: If there is one.
    """
    if kind:
        raise HidingError(
            f"{name!r} returns tensors inside of a {kind!r}, or writes them into one that it is given; they cannot be "
            f"taken out of it to be sent to other stages. Let it return tensors, or a tuple, list, dict or dataclass "
            f"of them."
        )
