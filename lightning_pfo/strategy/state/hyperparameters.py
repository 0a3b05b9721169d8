"""Modules among the hyperparameters of a checkpoint (`save_hyperparameters()` with a `net`): saved as a whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import tree_leaves, tree_map_only
from lightning_pfo.strategy.state.whole_module import gather_tensors_of, whole_copy


def whole_hyperparameters(
    owner: nn.Module,
    hyperparameters: Any,
    state: Mapping[str, Any],
    last_rank: int,
    group: dist.ProcessGroup | None,
    patches: Patches,
) -> Callable[[], Any] | None:
    """Hyperparameters in which modules of the user's module have the layers of all ranks; a collective call.

    Args:
        owner: The user's module.
        hyperparameters: Those that it has saved.
        state: Its state dict on the first rank, whose tensors the modules share, so that a file has them once.
        last_rank: The rank of the last stage.
        group: The pipeline's processes; None is the world.
        patches: What the pipeline has changed in the module.

    Returns:
        What makes them, on the first rank; None if there are no such modules, on all ranks.
    """
    inside = {id(module) for module in owner.modules()}
    parts = [m for m in tree_leaves(hyperparameters) if isinstance(m, nn.Module) and id(m) in inside]
    if not parts:
        return None
    gathered = gather_tensors_of(owner, parts, last_rank, group)
    values = {name: _shared(state.get(name), value) for name, value in gathered.items()}

    def whole(module: nn.Module) -> nn.Module:
        return whole_copy(module, owner, values, patches) if id(module) in inside else module

    return lambda: tree_map_only(nn.Module, whole, hyperparameters)


def _shared(saved: Any, value: torch.Tensor) -> torch.Tensor:
    is_same = isinstance(saved, torch.Tensor) and saved.shape == value.shape and saved.dtype == value.dtype
    return saved if is_same else value
