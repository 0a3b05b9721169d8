"""Running a module only to learn something of it: what it keeps in attributes and buffers is put back afterwards."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.parallel.compat import children_of, tensors_of

_LONGEST = 10_000
"""Containers of more items are data: their items are kept, but not looked into."""

_LARGEST_BYTES = 256 * 2**20
"""Larger tensors are data as well, and not copied."""


@contextmanager
def untouched(root: nn.Module, *, values: bool = True) -> Iterator[None]:
    """Put back, when the context is closed, what modules hold: attributes, containers, buffers, random generators.

    Parameters and very large tensors keep what was written into them, and so do objects of other classes.

    Args:
        root: The outermost module.
        values: Whether values of tensors are put back too, which takes a copy of each (but the very large).
    """
    remembered = _Remembered(values)
    for module in root.modules():
        remembered.module(module)
    try:
        yield
    finally:
        with torch.no_grad():
            for undo in reversed(remembered.undo):
                undo()


class _Remembered:
    """How to put objects back, each noted once."""

    def __init__(self, values: bool) -> None:
        self.undo: list[Callable[[], Any]] = []
        self._values = values
        self._seen: dict[int, Any] = {}  # the objects are kept, so that their ids stay theirs

    def module(self, module: nn.Module) -> None:
        for registry in (tensors_of(module).parameters, children_of(module)):
            self._seen[id(registry)] = registry
        attributes = vars(module)
        self.undo.append(partial(_refill, attributes, dict(attributes)))
        for value in attributes.values():
            self.value(value)

    def value(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (str, int, float, nn.Module, nn.Parameter)):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            is_state = value.is_leaf and not value.is_meta and value.layout == torch.strided
            if self._values and is_state and value.numel() * value.element_size() <= _LARGEST_BYTES:
                self.undo.append(partial(_write_back, value.detach(), value.detach().clone()))
        elif isinstance(value, (dict, list, set, deque, tuple)):
            if not isinstance(value, tuple):
                self.undo.append(partial(_refill, value, value.copy()))
            if len(value) <= _LONGEST:
                for item in value.values() if isinstance(value, dict) else value:
                    self.value(item)
        elif isinstance(value, torch.Generator):
            self.undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self.undo.append(partial(value.setstate, value.getstate()))
        elif hasattr(value, "bit_generator"):  # one of NumPy
            self.undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))


def _write_back(tensor: torch.Tensor, before: torch.Tensor) -> None:
    """Give a tensor its values again; one that still has them may be such that it cannot be written to."""
    if not torch.equal(tensor, before):
        tensor.copy_(before)


def _refill(container: Any, items: Any) -> None:
    """Give a container the items that it had; one that still has them is not touched."""
    if len(container) == len(items) and all(map(_is_same, _items_of(container), _items_of(items))):
        return
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(items)
    else:
        container.extend(items)


def _items_of(container: Any) -> Any:
    return container.items() if isinstance(container, dict) else container


def _is_same(now: Any, before: Any) -> bool:
    if isinstance(now, tuple) and len(now) == 2:  # of a dict, which makes them as they are asked for
        return now[0] is before[0] and now[1] is before[1]
    return now is before
