"""Which rank holds which parameters.

Layers of other ranks stay in the module as placeholders on the meta device: names, parameter order and optimizer ids
are those of a single device, so `configure_optimizers` and checkpoints need no change. Parameters outside the pipelined
module, and those shared by layers of several stages (tied), are kept on every rank; their gradients are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.core.errors import ConfigurationError

_SPLIT = "_pfo_split"


def find_shared_parameters(root: nn.Module, pipelined: nn.Sequential, boundaries: Sequence[int]) -> list[nn.Parameter]:
    """List the parameters every rank keeps, in the order of `root.parameters()`."""
    users: dict[int, set[int]] = {}
    for stage, (start, stop) in enumerate(pairwise(boundaries)):
        for layer in list(pipelined)[start:stop]:
            for parameter in layer.parameters():
                users.setdefault(id(parameter), set()).add(stage)
    outside = _parameters_outside(root, pipelined)
    return [p for p in root.parameters() if id(p) in outside or len(users[id(p)]) > 1]


def _parameters_outside(root: nn.Module, pipelined: nn.Module) -> set[int]:
    within = set(map(id, pipelined.modules()))
    return {
        id(parameter)
        for module in root.modules()
        if id(module) not in within
        for parameter in module.parameters(recurse=False)
    }


def release_other_layers(
    pipelined: nn.Sequential, boundaries: Sequence[int], stages: Sequence[int], shared: Sequence[nn.Parameter]
) -> None:
    """Replace the tensors of layers outside `stages` by placeholders on the meta device.

    Raises:
        ConfigurationError: If the module was split before in another way, so that tensors this stage needs are gone.
    """
    split = (tuple(boundaries), tuple(stages))
    before = pipelined.__dict__.get(_SPLIT)
    if before is not None:
        if before != split:
            raise ConfigurationError(
                f"This model was split before with boundaries {list(before[0])} and holds only the layers of stages "
                f"{list(before[1])}; now {list(boundaries)} (stages {list(stages)}) is asked for. Build the model "
                f"anew, or keep the partition, the schedule and the number of devices."
            )
        return
    keep = {id(parameter) for parameter in shared}
    for index, layer in enumerate(pipelined):
        if any(boundaries[stage] <= index < boundaries[stage + 1] for stage in stages):
            continue
        for module in layer.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if id(parameter) not in keep:
                    module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            for name, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[name] = buffer.to("meta")
    pipelined.__dict__[_SPLIT] = split


def move_local_tensors(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, leaving alone placeholders, and what is divided over processes: it is there."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else tensor.to(device)

    if not any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        module._apply(move)  # type: ignore[no-untyped-call]
        return
    for child in module.children():
        move_local_tensors(child, device)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not isinstance(tensor, DTensor):
            tensor.data = move(tensor.data)


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of `module` that this rank holds."""
    return [parameter for parameter in module.parameters() if not parameter.is_meta]
