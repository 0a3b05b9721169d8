"""What a call is told apart by from others, whichever comes first: ranks may make calls in other orders.

A step that walks over a set of texts (`for kind in set(self.config.layer_types)`) does so in an order of its own in
each process, since Python hashes texts with other numbers in each. So values are known by what they are made of: the
function, the constants that it is given, and what its other arguments are made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import torch

from lightning_pfo.strategy.compat.tensors import FakeTensor
from lightning_pfo.strategy.model.tracing.noticing.leaves import is_value
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.parallel.groups import checksum

_CONSTANTS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size, slice, type(Ellipsis))
_LARGEST = 4096
"""Larger tensors of the step's own, such as those of a batch, are told apart by their form only."""


class Contents:
    """Numbers of calls and values, by their contents.

    Attributes:
        of_values: The numbers of what values have now, by label: others after a change in place.
    """

    def __init__(self) -> None:
        self.of_values: dict[int, int] = {}
        self._times = Counter[int]()

    def of_call(self, what: Any, names: Iterable[str], leaves: Iterable[Any]) -> int:
        """The number of a call; of several that are alike each has its own, in order.

        Args:
            what: A unit, or a function.
            names: The names of parameters and buffers that it is given.
            leaves: Its arguments, flattened.
        """
        names = list(names)
        told = [_name(what), *names, *(_told(leaf, self.of_values, by_name=bool(names)) for leaf in leaves)]
        number = number_of(told)
        self._times[number] += 1
        return number if self._times[number] == 1 else number_of([number, self._times[number]])


def number_of(told: Any) -> int:
    """A number of 63 bits for what has a text of its own."""
    return int.from_bytes(blake2b(repr(told).encode(), digest_size=8).digest(), "little") >> 1


def _name(what: Any) -> str:
    name = getattr(what, "name", None) or getattr(what, "__qualname__", None) or getattr(what, "__name__", None)
    return name if isinstance(name, str) else type(what).__name__


def _told(leaf: Any, of_values: Mapping[int, int], *, by_name: bool) -> str:
    if is_value(leaf):
        return str(of_values.get(leaf.label))
    if isinstance(leaf, torch.Tensor):
        with following(None):
            form = f"{tuple(leaf.shape)} {leaf.dtype}"
            if by_name or is_placeholder(leaf) or isinstance(leaf, FakeTensor) or leaf.numel() > _LARGEST:
                return form
            try:
                return f"{form} {checksum(leaf)}"
            except RuntimeError:  # sparse, or within a transform of torch.func
                return form
    if isinstance(leaf, torch.device):
        return leaf.type
    return repr(leaf) if isinstance(leaf, _CONSTANTS) else type(leaf).__name__
