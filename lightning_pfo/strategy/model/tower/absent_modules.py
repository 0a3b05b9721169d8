"""Stand-ins for modules whose parameters are on other ranks.

A stand-in returns tensors of the right shape that are NaN everywhere. So whatever another stage has to compute shows:
what is NaN where a stage begins must be received, and what is NaN later was computed from a value that was not sent.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from lightning_pfo.strategy.model.caches import Caches
from lightning_pfo.strategy.model.untouched import untouched
from lightning_pfo.strategy.parallel.compat import tensors_of, tree_leaves, tree_map, tree_map_only


class StandIns:
    """What the calls of modules on other ranks return, in the order of the calls; computed once.

    Args:
        device: Where the tensors are.
        caches: The caches of the process.
    """

    def __init__(self, device: torch.device, caches: Caches) -> None:
        self._device = device
        self._caches = caches
        self._returned: list[Any] = []
        self._next = 0
        self._values: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def rewind(self) -> None:
        """Begin anew with the first call."""
        self._next = 0

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a call of `module` would, in form, with NaN in place of values (zero where there is no NaN).

        Where the shape depends on values, it is taken to be that of the first tensor among the arguments, as it is for
        the layers of a tower.
        """
        if self._next == len(self._returned):
            try:
                outline = call_on_meta(module, args, kwargs, self._caches)
            except Exception:
                outline = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), None)
                if outline is None:
                    raise
            self._returned.append(tree_map_only(torch.Tensor, self._fill, outline))
        self._next += 1
        return self._returned[self._next - 1]

    def _fill(self, outline: torch.Tensor) -> torch.Tensor:
        key = (outline.shape, outline.dtype)
        if key not in self._values:
            has_nan = outline.is_floating_point() or outline.is_complex()
            value = float("nan") if has_nan else 0
            self._values[key] = torch.full(outline.shape, value, dtype=outline.dtype, device=self._device)
        # each an object of its own, on the same memory
        return self._values[key].view_as(self._values[key])

    def made(self) -> set[int]:
        """The ids of all tensors made."""
        return {id(leaf) for leaf in tree_leaves(self._returned) if isinstance(leaf, torch.Tensor)}


class _Bare(nn.Module):
    """Calls a module's `forward` without its hooks, which may gather parameters or compile."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def call_on_meta(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], caches: Caches) -> Any:
    """Call a module on the meta device, which computes shapes only, wherever its parameters are.

    What it keeps for later calls, in its attributes or in caches of the process, is forgotten: that has no values.
    """
    bare = _Bare(module)
    # each module once: torch would not put back the tensors of a module that is held in two places
    tensors = {
        f"{path}.{name}": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for path, part in bare.named_modules()
        for name, tensor in (item for named in tensors_of(part) for item in named.items())
        if tensor is not None
    }
    args, kwargs = tree_map(_on_meta, (args, kwargs))
    with caches.left_alone(), untouched(module, values=False), torch.no_grad(), torch.device("meta"):
        return functional_call(bare, tensors, args, kwargs, tie_weights=False)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("meta")
    return copy.deepcopy(value)  # a cache for keys and values would remember shapes without values


def is_nan(value: Any) -> bool:
    """Whether a tensor holds NaN."""
    return isinstance(value, torch.Tensor) and not value.is_meta and bool(torch.isnan(value).any())
