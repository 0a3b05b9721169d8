"""Which rank holds which parameters.

Modules of other ranks stay in the module as placeholders on the meta device: names, parameter order and optimizer ids
are those of a single device, so `configure_optimizers` and checkpoints need no change. What several stages use, such as
tied weights, is held by the ranks of these, which sum its gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import map_tensors, named_tensors, tensors_of
from lightning_pfo.strategy.model.tracing.placeholders import mark_placeholders


@dataclass(frozen=True)
class Part:
    """A module, e.g. a layer, and the stages that run it."""

    module: nn.Module
    stages: frozenset[int]


UNCALLED = ("everywhere", "once")
"""Who holds what the first batch is not known to use: all, as any may need it later, or the last stage."""

Users = Mapping[str, frozenset[int]]
"""The stages that use a parameter or buffer, by its (first) name."""


def check_uncalled(who: str) -> None:
    """Check the setting `hold_uncalled`.

    Raises:
        ConfigurationError: If it is none of `UNCALLED`.
    """
    if who not in UNCALLED:
        raise ConfigurationError(f"hold_uncalled is {' or '.join(map(repr, UNCALLED))}; got {who!r}.")


def check_initialised(root: nn.Module) -> None:
    """Check that parameters have shapes, by which a model is divided.

    Raises:
        ConfigurationError: If a lazy module (`nn.LazyLinear`) has seen no input yet.
    """
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        if is_lazy(tensor):
            raise ConfigurationError(
                f"A pipeline divides a model by its parameters, but {name!r} has no shape yet, as its lazy module has "
                f"seen no input. Call the model once on a batch when it is made (with torch.no_grad(): "
                f"self.model(torch.zeros(1, 8)) in __init__ or configure_model), or give it sizes (nn.Linear)."
            )


def check_scripted(root: nn.Module) -> None:
    """Check that ranks can hold parts of a module.

    Raises:
        ConfigurationError: If a part is of `torch.jit` and has parameters, which nobody can replace.
    """
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigurationError(
                f"Each rank holds the parameters of its own stages, and those of modules made by torch.jit cannot be "
                f"taken away; {name!r} is one ({module.original_name}). Give the module as it was before "
                f"torch.jit.script; compile=True compiles layers."
            )


def check_unwrapped(root: nn.Module) -> None:
    """Check that nothing in a module brings together what processes compute, as if each held all of it.

    Raises:
        ConfigurationError: If DistributedDataParallel or DataParallel does.
    """
    for name, module in root.named_modules():
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise ConfigurationError(
                f"A pipeline divides the layers of a model, and averages gradients over its replicas itself; "
                f"{name!r} is wrapped in {type(module).__name__}. Give what is within it (model.module); "
                f"data_parallel_size=2 makes two replicas."
            )


def find_users(
    root: nn.Module, parts: Sequence[Part], users_beside: Users, num_stages: int, uncalled: frozenset[int] | None = None
) -> dict[str, frozenset[int]]:
    """Find the stages that use each parameter and buffer, in the order of the module; its ranks hold it, and no other.

    What belongs to no part and is not known to be used anywhere may be used on any stage, as in evaluation, if
    nothing else is said of it.

    Args:
        root: The user's module.
        parts: What each stage runs.
        users_beside: The stages that use a tensor beside the parts it belongs to.
        num_stages: Number of stages.
        uncalled: The stages that hold what is not known to be used; None: all.
    """
    everyone = frozenset(range(num_stages))
    tensors = named_tensors(root)
    within = {id(tensor) for part in parts for tensor in named_tensors(part.module).values()}
    users: dict[int, frozenset[int]] = {}
    for name, stages in users_beside.items():
        is_state = isinstance(tensors[name], nn.Parameter) or id(tensors[name]) in within
        users[id(tensors[name])] = stages if is_state else everyone  # buffers of the user's own code are at hand
    for part in parts:
        for tensor in named_tensors(part.module).values():
            users[id(tensor)] = users.get(id(tensor), frozenset()) | part.stages
    return {name: users.get(id(tensor), uncalled or everyone) for name, tensor in tensors.items()}


def tied_names(root: nn.Module) -> dict[str, str]:
    """The first name of a parameter or buffer, by each other name that it has."""
    first = {id(tensor): name for name, tensor in named_tensors(root).items()}
    all_names = (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
    return {name: first[id(tensor)] for name, tensor in chain(*all_names) if first[id(tensor)] != name}


def release_others(root: nn.Module, users: Users, stages: Collection[int]) -> None:
    """Replace the tensors that none of `stages` uses by placeholders on the meta device."""
    released = {id(t) for name, t in named_tensors(root).items() if users[name].isdisjoint(stages)}
    placeholders: dict[int, torch.Tensor] = {}  # what is tied stays tied, so that optimizers count alike everywhere
    for module in root.modules():
        own = tensors_of(module)
        for name, parameter in own.parameters.items():
            if parameter is None or parameter.is_meta or id(parameter) not in released:
                continue
            if id(parameter) not in placeholders:
                on_meta = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                placeholders[id(parameter)] = on_meta
            own.parameters[name] = cast("nn.Parameter", placeholders[id(parameter)])
        for name, buffer in own.buffers.items():
            if buffer is not None and id(buffer) in released:
                own.buffers[name] = placeholders.setdefault(id(buffer), buffer.to("meta"))
    mark_placeholders(root)


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


def parameters_by_end(root: nn.Module, users: Users, stages: Collection[int]) -> dict[int, list[nn.Parameter]]:
    """The parameters that a rank holds, by the stage that uses them last in an iteration.

    That is the first: the last backward of a stage comes after that of the stage behind it.
    """
    by_end: dict[int, list[nn.Parameter]] = {stage: [] for stage in sorted(stages)}
    for name, parameter in root.named_parameters():
        if not parameter.is_meta:
            by_end[min(users[name] & set(stages))].append(parameter)
    return by_end
