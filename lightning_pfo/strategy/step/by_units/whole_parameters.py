"""Parameters and buffers of other ranks, on all of them for a while: for hooks that need values of the whole module.

A moving average of a student, a target network, a norm of all weights: these go over the parameters of modules whose
layers lie on several ranks. Every rank has all of them while it does so, and computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.parallel.groups import as_bytes, global_rank


@contextmanager
def whole_parameters(
    modules: Sequence[nn.Module], device: torch.device, group: dist.ProcessGroup | None, *, gradients: bool = False
) -> Iterator[None]:
    """Let modules have the values of all ranks while the context is open; entered by all ranks together.

    Afterwards each rank has its own again, with what was written into them; what is written into others is gone, since
    their own rank has written the same.

    Args:
        modules: Parts of the user's module, the same on all ranks.
        device: Where values of other ranks are put.
        group: The pipeline's processes; None is the world.
        gradients: Whether parameters have their gradients, too; what is written into others' gradients is gone.

    Raises:
        ConfigurationError: On every rank, if something of them is divided (FSDP2, tensor parallelism); or if parameters
            are registered or deleted meanwhile.
    """
    places: list[tuple[Any, str]] = [
        (tensors, name)
        for part in dict.fromkeys(part for module in modules for part in module.modules())
        for tensors in tensors_of(part)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    found = {id(tensors[name]): tensors[name] for tensors, name in places}
    everyone: list[Any] = [None] * dist.get_world_size(group)
    told = [(_how(tensor), gradients and tensor.grad is not None) for tensor in found.values()]
    dist.all_gather_object(everyone, told, group=group)
    if any(way == "divided" for ways in everyone for way, _ in ways):
        raise ConfigurationError(
            "whole_parameters() is for parameters that a rank has as a whole, and here layers are divided "
            "(fully_shard, tensor parallelism). Use trainer.strategy.gather_module(), or leave these options out."
        )
    values: dict[int, torch.Tensor] = {}
    for told_of_it, (key, tensor) in zip(zip(*everyone, strict=True), found.items(), strict=True):
        ways, have = zip(*told_of_it, strict=True)
        if "absent" not in ways or "held" not in ways:
            continue
        value = _of_rank(ways.index("held"), None if tensor.is_meta else tensor.detach(), tensor, device, group)
        if tensor.is_meta:
            values[key] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
        if any(have):
            gradient = _of_rank(have.index(True), tensor.grad, tensor, device, group)
            if tensor.is_meta:
                values[key].grad = gradient
    replaced = [(tensors, name, tensors[name]) for tensors, name in places if id(tensors[name]) in values]
    for tensors, name, tensor in replaced:
        tensors[name] = values[id(tensor)]
    names = _names_in(modules)
    try:
        yield
    finally:
        have_changed = _names_in(modules) != names
        for tensors, name, tensor in replaced:
            tensors[name] = tensor
    if have_changed:
        raise ConfigurationError(
            "While a module is split it keeps the parameters and buffers that it has; within whole_parameters() some "
            "were registered or deleted, as torch.nn.utils.prune does where a weight has no mask yet. Give those that "
            "are to be pruned one before, by prune.identity(layer, 'weight') in __init__ or configure_model, and prune "
            "here with importance_scores=layer.weight_orig."
        )


def _of_rank(
    source: int, own: torch.Tensor | None, like: torch.Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """What one rank has of a tensor, on all; what this rank has itself stays."""
    if own is None:
        own = torch.empty(like.shape, dtype=like.dtype, device=device)
    elif own.layout != torch.strided:  # the gradient of a sparse embedding
        own = own.to_dense()
    value = own.contiguous()
    dist.broadcast(as_bytes(value), src=global_rank(group, source), group=group)
    return value


def _names_in(modules: Sequence[nn.Module]) -> list[str]:
    return [name for module in modules for part in module.modules() for named in tensors_of(part) for name in named]


def _how(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "absent"
    return "held" if type(tensor) in (torch.Tensor, nn.Parameter) else "divided"
