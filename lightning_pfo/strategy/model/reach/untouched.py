"""Running a module only to learn something of it: what it keeps in attributes and buffers is put back afterwards."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from operator import is_
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pfo.strategy.compat.modules import children_of, tensors_of
from lightning_pfo.strategy.compat.optimizers import optimizer_hooks_aside
from lightning_pfo.strategy.compat.tensors import memory_of
from lightning_pfo.strategy.model.reach.flags import Flags
from lightning_pfo.strategy.model.reach.places import GENERATORS, Places, set_state, state_of
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import followed_in

_LONGEST = 10_000
"""Containers of more items are data: their items are kept, but not looked into."""

_LARGEST_BYTES = 256 * 2**20
"""Larger tensors are data as well, and not copied."""

_LARGEST_OF_SAMPLES_BYTES = 2**12
"""The same of what makes samples, which may hold many of them in tensors."""

_PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), type, FunctionType, MethodType, torch.dtype))
"""Types of most attributes; there is nothing in them to put back."""


@contextmanager
def untouched(root: nn.Module, *, values: bool = True, only_if_it_fails: bool = False) -> Iterator[None]:
    """Put back, when the context is closed, what modules hold: attributes, flags, containers, buffers, generators.

    So is what a step reaches elsewhere, see `places`, modules among it, such as metrics in a dict. Parameters and very
    large tensors keep what was written into them, and so do objects of libraries. A parameter whose `data` was set has
    that of before.

    Args:
        root: The outermost module.
        values: Whether values of tensors are put back too, which takes a copy of each (but the very large).
        only_if_it_fails: Whether nothing is put back but where the context is left by an error.
    """
    remembered = _Remembered(_LARGEST_BYTES if values else 0)
    remembered.undo.append(Flags(root).take_changes)
    for module in root.modules():
        remembered.module(module)
    remembered.places(Places(root))
    stays = False
    try:
        yield
        stays = only_if_it_fails
    finally:
        if not stays:
            followed = followed_in(root)  # also those that have been since
            remembered.put_back()
            for attributes, forward in followed:
                attributes["forward"] = forward


@contextmanager
def attributes_untouched(holder: Any, *, but_made: bool = False) -> Iterator[None]:
    """Put back, when the context is closed, the attributes of an object and what containers among them have.

    Tensors keep what was written into them: where an object holds data, these may be all that there is.

    Args:
        holder: The object; one without attributes, such as None, has nothing to put back.
        but_made: Whether objects stay that were made where there was nothing, such as a dataset that is read once.
    """
    attributes = getattr(holder, "__dict__", {})
    before = dict(attributes) if but_made else {}
    remembered = _Remembered(0)
    remembered.attributes(attributes)
    try:
        yield
    finally:
        made = {name: value for name, value in attributes.items() if but_made and _is_made(value, before.get(name))}
        remembered.put_back()
        attributes.update(made)


@contextmanager
def places_untouched(places: Places) -> Iterator[None]:
    """Put back, when the context is closed, what is at the places where samples are made, but large tensors."""
    remembered = _Remembered(_LARGEST_OF_SAMPLES_BYTES)
    remembered.places(places)
    try:
        yield
    finally:
        remembered.put_back()


@contextmanager
def steps_unheard(optimizer: Optimizer) -> Iterator[None]:
    """Let copies of an optimizer make steps while the context is open, of which nobody hears.

    What its class counts, or writes into variables of its file, is put back; hooks of all optimizers are not called.
    """
    with places_untouched(Places(SimpleNamespace(), classes=(type(optimizer),))), optimizer_hooks_aside():
        yield


def _is_made(value: Any, before: Any) -> bool:
    is_state = type(value) in _PLAIN or isinstance(value, (Iterator, *GENERATORS))
    return before is None and not is_state


class _Remembered:
    """How to put objects back, each noted once; values of tensors that have more bytes stay."""

    def __init__(self, largest_bytes: int) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._largest_bytes = largest_bytes
        self._seen: dict[int, Any] = {}  # the objects are kept, so that their ids stay theirs

    def module(self, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        for registry in (tensors_of(module).parameters, children_of(module)):
            self._seen[id(registry)] = registry
        for parameter in tensors_of(module).parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor) and not is_placeholder(parameter):
                self.undo.append(partial(_memory_back, parameter, parameter.detach()))
        self.attributes(vars(module))

    def places(self, places: Places) -> None:
        """Note what is not in modules."""
        for path in places.objects:
            self.attributes(places.containers[path])
        for settings in places.settings.values():
            self.undo.append(partial(_refill, settings, dict(settings)))
            self._items(value for value in settings.values() if isinstance(value, torch.Tensor))
        self._items(holder for holder in places.holders.values() if isinstance(holder, (dict, list, set, deque)))
        self._items(places.modules.values())

    def attributes(self, attributes: Any) -> None:
        """Note the attributes of an object."""
        self.undo.append(partial(_refill, attributes, dict(attributes)))
        self._items(attributes.values())

    def put_back(self) -> None:
        """Put everything back, the last first."""
        with torch.no_grad():
            for undo in reversed(self.undo):
                undo()

    def _items(self, items: Iterable[Any]) -> None:
        for item in items:
            if type(item) not in _PLAIN and id(item) not in self._seen:
                self._value(item)

    def _value(self, value: Any) -> None:
        if isinstance(value, nn.Module):
            for module in value.modules():
                self.module(module)
            return
        self._seen[id(value)] = value
        if isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self.undo.append(partial(_refill, value, value.copy()) if value else partial(_empty, value))
            if 0 < len(value) <= _LONGEST:
                self._items(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            is_state = value.is_leaf and not is_placeholder(value) and value.layout == torch.strided
            if is_state and value.numel() * value.element_size() <= self._largest_bytes:
                self.undo.append(partial(write_back, value, value.detach(), value.detach().clone()))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= self._largest_bytes:
                self.undo.append(partial(write_array_back, value, value.copy()))
        elif isinstance(value, GENERATORS):
            self.undo.append(partial(set_state, value, state_of(value)))


def write_back(tensor: torch.Tensor, data: torch.Tensor, before: torch.Tensor) -> None:
    """Give a tensor its memory, size and values again; one that still has them may not be one to be written to."""
    if not torch.equal(data, before):
        data.copy_(before)
    if memory_of(tensor) != memory_of(data) or tensor.shape != data.shape:  # layers may `resize_` their buffers
        tensor.data = data


def _memory_back(parameter: nn.Parameter, data: torch.Tensor) -> None:
    """Let a parameter be where it was, of which a step has set `data` to other memory."""
    if memory_of(parameter) != memory_of(data):
        parameter.data = data


def write_array_back(array: np.ndarray, before: np.ndarray) -> None:
    """Give an array its values again, if it can be written to."""
    if array.flags.writeable:
        array[...] = before


def _empty(container: Any) -> None:
    if container:
        container.clear()


def _refill(container: Any, items: Any) -> None:
    """Give a container the items that it had; one that still has them is not touched."""
    if len(container) == len(items) and all(map(is_, container, items)) and _values_are_same(container, items):
        return
    container.clear()
    if isinstance(container, (MutableMapping, set)):
        container.update(items)
    else:
        container.extend(items)


def _values_are_same(now: Any, before: Any) -> bool:
    return not isinstance(now, MutableMapping) or all(map(is_, now.values(), before.values()))
