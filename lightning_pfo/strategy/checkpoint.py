"""Checkpoints in Lightning's own format: one file with the keys, order and optimizer ids of a single device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_pfo.core.errors import ConfigurationError


def gather_module_state(module: nn.Module, last_rank: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Collect the full state dict on the first rank of `group` (empty on other ranks); a collective call.

    Of what every rank has (what is outside the pipelined module), the copy of `last_rank` is kept: the rank of the last
    stage alone runs whole steps, so only its buffers are up to date.
    """
    state = module.state_dict()
    local = {key: value for key, value in state.items() if not _is_placeholder(value)}
    gathered = _gather(local, group)
    if gathered is None:
        return {}
    merged: dict[str, Any] = {}
    for part in (*gathered, gathered[last_rank]):
        merged.update(part)
    return {key: merged[key] for key in state}


def gather_optimizer_state(optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Collect the optimizer state of all stages on the first rank of `group` (empty on others); a collective call."""
    state = optimizer.state_dict()
    gathered = _gather(state["state"], group)
    if gathered is None:
        return {}
    merged = {index: values for part in reversed(gathered) for index, values in part.items()}
    return {"state": dict(sorted(merged.items())), "param_groups": state["param_groups"]}


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load this rank's part of a full state dict.

    Raises:
        ConfigurationError: If `strict` and keys are missing or unexpected.
    """
    own = module.state_dict()
    missing = [key for key in own if key not in state]
    unexpected = [key for key in state if key not in own]
    if strict and (missing or unexpected):
        raise ConfigurationError(
            f"The checkpoint does not fit {type(module).__name__}: missing {missing or 'nothing'}, unexpected "
            f"{unexpected or 'nothing'}. Load a checkpoint of the same model, or pass strict=False."
        )
    local = {key: value for key, value in state.items() if key in own and not _is_placeholder(own[key])}
    module.load_state_dict(local, strict=False)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load this rank's part of a full optimizer state dict."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    local = {
        index: values
        for index, values in state["state"].items()
        if index < len(parameters) and not parameters[index].is_meta
    }
    optimizer.load_state_dict({"state": local, "param_groups": state["param_groups"]})


def _is_placeholder(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _gather(value: Any, group: dist.ProcessGroup | None) -> list[Any] | None:
    on_cpu = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), value)
    gathered: list[Any] | None = [None] * dist.get_world_size(group) if dist.get_rank(group) == 0 else None
    dist.gather_object(on_cpu, gathered, dst=0 if group is None else dist.get_global_rank(group, 0), group=group)
    return gathered
