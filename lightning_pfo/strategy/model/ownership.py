"""Which rank holds which parameters.

Modules of other ranks stay in the module as placeholders on the meta device: names, parameter order and optimizer ids
are those of a single device, so `configure_optimizers` and checkpoints need no change. Parameters outside the parts of
the stages, and those that several stages use (tied), are kept on every rank; their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.parallel.compat import map_tensors, tensors_of


@dataclass(frozen=True)
class Part:
    """A module, e.g. a layer, and the stages that run it."""

    module: nn.Module
    stages: frozenset[int]


def find_shared_parameters(
    root: nn.Module, parts: Sequence[Part], users_beside: Mapping[nn.Parameter, frozenset[int]]
) -> list[nn.Parameter]:
    """List the parameters every rank keeps, in the order of `root.parameters()`.

    Args:
        root: The user's module.
        parts: What each stage runs.
        users_beside: Stages that use a parameter beside the parts it belongs to.
    """
    users: dict[int, set[int]] = {id(parameter): set(stages) for parameter, stages in users_beside.items()}
    for part in parts:
        for parameter in part.module.parameters():
            users.setdefault(id(parameter), set()).update(part.stages)
    outside = _parameters_outside(root, parts)
    return [p for p in root.parameters() if id(p) in outside or len(users[id(p)]) > 1]


def _parameters_outside(root: nn.Module, parts: Sequence[Part]) -> set[int]:
    within = {id(module) for part in parts for module in part.module.modules()}
    return {
        id(parameter)
        for module in root.modules()
        if id(module) not in within
        for parameter in module.parameters(recurse=False)
    }


def modules_elsewhere(parts: Sequence[Part], stages: Collection[int]) -> list[nn.Module]:
    """The modules, at any depth, of which no stage in `stages` runs anything."""
    here = {id(m) for part in parts if not part.stages.isdisjoint(stages) for m in part.module.modules()}
    unique = {id(m): m for part in parts for m in part.module.modules() if id(m) not in here}
    return list(unique.values())


def release_other_parts(parts: Sequence[Part], stages: Sequence[int], shared: Sequence[nn.Parameter]) -> None:
    """Replace the tensors of modules that none of `stages` runs by placeholders on the meta device."""
    keep = {id(parameter) for parameter in shared}
    placeholders: dict[int, nn.Parameter] = {}  # what is tied stays tied, so that optimizers count alike everywhere
    for module in modules_elsewhere(parts, stages):
        own = tensors_of(module)
        for name, parameter in own.parameters.items():
            if parameter is None or parameter.is_meta or id(parameter) in keep:
                continue
            if id(parameter) not in placeholders:
                on_meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                placeholders[id(parameter)] = on_meta
            own.parameters[name] = placeholders[id(parameter)]
        for name, buffer in own.buffers.items():
            own.buffers[name] = None if buffer is None else buffer.to("meta")


def move_local_tensors(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, leaving alone placeholders, and what is divided over processes: it is there."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        map_tensors(module, move)
        return
    for child in module.children():
        move_local_tensors(child, device)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not isinstance(tensor, DTensor):
            tensor.data = move(tensor.data)


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that this rank holds."""
    return [parameter for parameter in module.parameters() if not parameter.is_meta]
