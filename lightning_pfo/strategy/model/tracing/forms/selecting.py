"""Operators whose results have a shape that depends on values, as `nonzero` or `x[mask]`: what a trace makes of them.

A trace runs on zeros, of which a mask may select none, and what follows may not run on nothing. So all is selected; and
once more less than that, which tells what sizes depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

from lightning_pfo.strategy.compat.tensors import TorchDispatchMode
from lightning_pfo.strategy.model.tracing.tracked import Tracked


class Selected(Enum):
    """What is selected by the values of stages."""

    BY_VALUES = "what the values say"
    ALL = "all"
    FEWER = "less than all"


class Selecting(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Selects all, or fewer, where values decide about shapes.

    Args:
        selected: What is selected.
        by_stages: Whether values of stages decide; else those of the batch, which all ranks have, and they count.

    Attributes:
        by_stages_found: Whether there was an operator about which values of stages decide.
        by_batch_found: Whether there was another one.
    """

    def __init__(self, selected: Selected, *, by_stages: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.by_stages_found = self.by_batch_found = False
        self._selected = selected
        self._by_stages = by_stages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fill = _FILLED.get(func.overloadpacket)
        has_shape_of_values = torch.Tag.dynamic_output_shape in func.tags or func.overloadpacket in _UNTAGGED
        if fill is _masks_filled and not any(map(_is_mask, args[1])):
            return func(*args, **kwargs)
        if has_shape_of_values:
            self.by_stages_found |= self._by_stages
            self.by_batch_found |= not self._by_stages
        if fill is None or not self._by_stages or self._selected is Selected.BY_VALUES:
            return func(*args, **kwargs)
        return func(*fill(args, self._selected is Selected.FEWER), **kwargs)


def decide_about_shapes(function: Any, leaves: list[Any]) -> bool:
    """Whether values of stages among the leaves of its arguments decide about the shape of what a function returns.

    Where a mask selects, its values decide, not those of what is selected from.
    """
    values = [leaf for leaf in leaves if isinstance(leaf, Tracked)]
    if getattr(function, "__name__", "") not in _WITH_MASKS:
        return bool(values)
    return any(_is_mask(leaf) for leaf in leaves[1:] if isinstance(leaf, Tracked))


_WITH_MASKS = ("__getitem__", "__setitem__", "masked_select", "index", "index_put", "index_put_")
_SELECTING = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "repeat_interleave"})


def selects(function: Any, args: Any) -> bool:
    """Whether a function of torch makes a tensor whose shape depends on values."""
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        indices = args[1] if isinstance(args[1], tuple) else args[1:]
        return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in indices)
    return name in _SELECTING or (name == "where" and len(args) == 1)


def _is_mask(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8)


def _mask(like: torch.Tensor, fewer: bool) -> torch.Tensor:
    mask = torch.ones(like.shape, dtype=like.dtype, device=like.device)
    if fewer:
        mask.view(-1)[-1:] = 0
    return mask


def _first_filled(args: tuple[Any, ...], fewer: bool) -> tuple[Any, ...]:
    return _mask(args[0], fewer), *args[1:]


def _second_filled(args: tuple[Any, ...], fewer: bool) -> tuple[Any, ...]:
    return args[0], _mask(args[1], fewer), *args[2:]


def _masks_filled(args: tuple[Any, ...], fewer: bool) -> tuple[Any, ...]:
    return args[0], [_mask(index, fewer) if _is_mask(index) else index for index in args[1]], *args[2:]


def _first_different(args: tuple[Any, ...], fewer: bool) -> tuple[Any, ...]:
    numbers = torch.arange(args[0].numel(), device=args[0].device).clamp(max=0 if fewer else _MOST_DIFFERENT - 1)
    return numbers.view(args[0].shape).to(args[0].dtype), *args[1:]


_MOST_DIFFERENT = 16
"""So many different values stand for all: a step may walk over them (`for label in labels.unique()`)."""
_aten = torch.ops.aten
_FILLED: Mapping[Any, Callable[[tuple[Any, ...], bool], tuple[Any, ...]]] = {
    packet: fill
    for names, fill in (
        (("nonzero", "repeat_interleave"), _first_filled),
        (("masked_select",), _second_filled),
        (("index", "index_put", "index_put_", "_index_put_impl_"), _masks_filled),
        (("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _first_different),
        (("bincount",), _first_different),
    )
    for name in names
    if (packet := getattr(_aten, name, None)) is not None
}
"""How arguments are filled so that all, or fewer, is selected."""

_UNTAGGED = frozenset(
    packet
    for name in ("_pack_padded_sequence", "_pad_packed_sequence", "_to_sparse", "_coalesce")
    if (packet := getattr(_aten, name, None)) is not None
)
"""Of which torch does not say that the shape of their results depends on values."""
