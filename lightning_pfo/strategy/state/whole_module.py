"""A split module as a whole, on one rank: to be saved by its own methods, exported, or to generate with.

It is a copy without anything that the pipeline has changed: parameters and buffers of all ranks, tied as they were, in
CPU memory. Tensors are sent one at a time, so that no rank but the first needs memory for more than one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import drop_hooks_of_tensor_parallelism, forward_pre_hooks_of
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.parallel.fsdp import holders_of
from lightning_pfo.strategy.state.alike import changed_in
from lightning_pfo.strategy.state.full import gather_tensors
from lightning_pfo.strategy.state.placeholders import unmarked

_NOTED = "_pfo_"
"""So begin the names of what a pipeline notes in modules: how they are divided."""


def gather_module(
    module: nn.Module, last_rank: int, group: dist.ProcessGroup | None, patches: Patches
) -> nn.Module | None:
    """Make a whole copy of a split module on the world's first rank; a collective call of all ranks.

    Args:
        module: The user's module.
        last_rank: The rank of the last stage, whose copy of what all ranks hold is taken.
        group: The pipeline's processes; None is the world.
        patches: What the pipeline has changed in the module; the copy has none of it.

    Returns:
        The module; None on other ranks.

    Raises:
        ConfigurationError: On the first rank, if the module has something that cannot be copied.
    """
    gathered = gather_tensors_of(module, [module], last_rank, group)
    if dist.get_rank() != 0:
        return None
    for name, tensor in _tensors_of(module).items():
        value = gathered[name]
        if not tensor.is_meta and (value.layout != torch.strided or local(tensor).data_ptr() == value.data_ptr()):
            gathered[name] = value.clone()
    return whole_copy(module, module, gathered, patches)


def gather_tensors_of(
    owner: nn.Module, parts: Sequence[nn.Module], last_rank: int, group: dist.ProcessGroup | None
) -> dict[str, torch.Tensor]:
    """All parameters and buffers of parts of a split module on the world's first rank; a collective call of all ranks.

    Args:
        owner: The user's module.
        parts: Modules in it, or itself.
        last_rank: The rank of the last stage, whose copy of what all ranks hold is taken.
        group: The pipeline's processes; None is the world.

    Returns:
        The tensors by their names in `owner`; none on other ranks.
    """
    wanted = {id(tensor) for part in parts for tensor in _tensors_of(part).values()}
    elsewhere = {id(tensor) for tensor, is_here in _made_before_calls(owner).values() if not is_here}
    held = {
        name: tensor
        for name, tensor in _tensors_of(owner).items()
        if id(tensor) in wanted and id(tensor) not in elsewhere and not tensor.is_meta
    }
    return gather_tensors(held, last_rank, group, changed_in(owner, held))


def _tensors_of(owner: nn.Module) -> dict[str, torch.Tensor]:
    # buffers under all names: what is the same on one rank may not be on another
    tensors = {**dict(owner.named_parameters()), **dict(owner.named_buffers(remove_duplicate=False))}
    return tensors | {name: tensor for name, (tensor, _) in _made_before_calls(owner).items()}


def _made_before_calls(owner: nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Plain tensors that layers make of their parameters before each call, by name; and whether that is on this rank.

    The older `weight_norm` and `spectral_norm` of torch.nn.utils, and `prune`, keep `weight` so: on ranks that do not
    run the layer it is that of the beginning.
    """
    made: dict[str, tuple[torch.Tensor, bool]] = {}
    for name, module in owner.named_modules():
        own = list(module.parameters(recurse=False))
        if own and forward_pre_hooks_of(module):
            is_here = not any(parameter.is_meta for parameter in own)
            plain = {key: value for key, value in vars(module).items() if type(value) is torch.Tensor}
            made |= {f"{name}.{key}".removeprefix("."): (value, is_here) for key, value in plain.items()}
    return made


def whole_copy(part: nn.Module, owner: nn.Module, values: Mapping[str, torch.Tensor], patches: Patches) -> nn.Module:
    """A copy of a part of a split module, with values of all ranks.

    Args:
        part: A module in `owner`, or itself.
        owner: The user's module.
        values: Those of its parameters and buffers, by their names in `owner`; the copy has these very tensors.
        patches: What the pipeline has changed in the module; the copy has none of it.

    Raises:
        ConfigurationError: If it has something that cannot be copied.
    """
    memo: dict[int, Any] = {id(holder): None for holder in holders_of(owner)}
    for name, tensor in _tensors_of(owner).items():
        value = values.get(name)
        if value is not None:
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    try:
        with patches.set_aside(), unmarked(owner), _graphs_left_behind():
            whole: nn.Module = copy.deepcopy(part, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"The whole module is a copy, and something in this one cannot be copied: {error}. Drop it before, or save "
            f"a checkpoint and load that into a new module."
        ) from error
    for each in whole.modules():
        for name in [name for name in vars(each) if name.startswith(_NOTED)]:
            del vars(each)[name]
    drop_hooks_of_tensor_parallelism(whole)
    return whole


@contextmanager
def _graphs_left_behind() -> Iterator[None]:
    """Let what layers keep of the last step (`self.aux = loss`) be copied, without the way back to what it comes of.

    Torch copies only what is no result of anything else that has gradients.
    """
    original: Any = torch.Tensor.__deepcopy__

    def copied(tensor: torch.Tensor, memo: dict[int, Any]) -> Any:
        if tensor.is_leaf or id(tensor) in memo:
            return original(tensor, memo)
        return memo.setdefault(id(tensor), tensor.detach().clone())

    with Patches() as changes:
        changes.set(torch.Tensor, "__deepcopy__", copied)
        yield
