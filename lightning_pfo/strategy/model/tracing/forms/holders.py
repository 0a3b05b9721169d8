"""Where parts of a model may keep something for the step: attributes, containers, and objects that they know."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from queue import Queue
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.model.tracing.forms.parts import attributes_of, slots_of
from lightning_pfo.strategy.model.variables import HOLDERS, Variables, is_library

LISTS = (list, deque)
OF_MODULES = frozenset(vars(nn.Module()))
_LONGEST = 1000
"""Longer containers are data, which nobody looks into."""
_DEEPEST = 6


def items_in(value: Any) -> Any:
    """What may hold tensors in a module, a container or an object of the user's; nothing of other values."""
    if isinstance(value, (dict, Variables, *LISTS)):
        return value
    if isinstance(value, (nn.Module, threading.local)):
        return vars(value)
    if isinstance(value, Queue):
        return value.queue
    if isinstance(value, ContextVar):
        return Variables(["content"], partial(_get, value), partial(_put, value), partial(_drop, value))
    kind: Any = type(value)
    if callable(value) or not (issubclass(kind, HOLDERS) or is_users(kind) or kind.__module__ == "collections"):
        return {}
    if not slots_of(kind):
        return getattr(value, "__dict__", {})
    names = list(dict.fromkeys((*slots_of(kind), *attributes_of(value))))
    return Variables(names, partial(getattr, value), partial(setattr, value), partial(delattr, value))


def _get(variable: ContextVar[Any], name: str) -> Any:
    try:
        return variable.get()
    except LookupError:
        raise KeyError(name) from None


def _put(variable: ContextVar[Any], name: str, content: Any) -> None:
    variable.set(content)


def _drop(variable: ContextVar[Any], name: str) -> None:
    """Who has set it alone could; a trace has a context of its own."""


def is_users(cls: type) -> bool:
    """Whether a class is the user's own."""
    return not issubclass(cls, torch.Tensor) and not is_library(cls.__module__)


def holders_in(roots: Iterable[Any]) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """All dicts, lists and attributes in modules and what they know: the root, the way from it, and what is there.

    Modules that are no parts of others, but in a list of theirs or an attribute beside (`self.parent = [model]`), are
    looked into too, though not at their parts.
    """
    roots = list(roots)
    seen = set(map(id, roots))  # nobody else leads to them
    for root in roots:
        seen.discard(id(root))
        for path, holder in _in(root, (), seen):
            yield root, path, holder


def _in(value: Any, path: tuple[Any, ...], seen: set[int]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    holder = items_in(value)
    is_empty = not holder and holder is not value
    may_hold = hasattr(value, "__dict__") or isinstance(value, ContextVar)
    if id(value) in seen or len(holder) > _LONGEST or (is_empty and not may_hold):
        return
    seen.add(id(value))
    yield path, holder
    without = OF_MODULES if isinstance(value, nn.Module) else ()
    for key, inner in list(enumerate(holder) if isinstance(holder, LISTS) else holder.items()):
        if key not in without and len(path) < _DEEPEST:
            yield from _in(inner, (*path, key), seen)


class AssignedBuffers:
    """What a call of a module assigns to buffers of it and its parts, which are as before when it has returned."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.found: list[tuple[nn.Module, str, torch.Tensor]] = []

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The module's `forward`, that notes them."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = [(part, dict(tensors_of(part).buffers)) for part in self._module.modules()]
            try:
                return forward(*args, **kwargs)
            finally:
                for part, of_part in before:
                    now = tensors_of(part).buffers
                    changed = {name: tensor for name, tensor in now.items() if of_part.get(name) is not tensor}
                    self.found += [(part, name, tensor) for name, tensor in changed.items() if tensor is not None]
                    now.update({name: of_part[name] for name in changed if name in of_part})

        return call


def last(holder: Any, number: int) -> list[Any]:
    """The last items of a list or deque."""
    return list(holder)[-number:]


def drop_last(holder: Any, number: int) -> None:
    """Let a list or deque lose its last items."""
    for _ in range(number):
        holder.pop()


def refill(holder: Any, items: Iterable[Any]) -> None:
    """Let a list or deque have other items."""
    items = list(items)
    holder.clear()
    holder.extend(items)
