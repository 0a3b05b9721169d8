"""A split module as a whole, on one rank: to be saved by its own methods, exported, or to generate with.

It is a copy without anything that the pipeline has changed: parameters and buffers of all ranks, tied as they were, in
CPU memory. Tensors are sent one at a time, so that no rank but the first needs memory for more than one of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import drop_hooks_of_tensor_parallelism
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.parallel.fsdp import forget_division, holders_of
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.state.alike import changed_in
from lightning_pfo.strategy.state.full import gather_tensors
from lightning_pfo.strategy.state.placeholders import unmarked


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
    # buffers under all names: what is the same on one rank may not be on another
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers(remove_duplicate=False))}
    held = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    gathered = gather_tensors(held, last_rank, group, changed_in(module, held))
    if dist.get_rank() != 0:
        return None
    memo: dict[int, Any] = {id(holder): None for holder in holders_of(module)}
    for name, tensor in tensors.items():
        value = gathered[name]
        if not tensor.is_meta and (value.layout != torch.strided or local(tensor).data_ptr() == value.data_ptr()):
            value = value.clone()
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    try:
        with patches.set_aside(), unmarked(module), _graphs_left_behind():
            whole: nn.Module = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError) as error:
        raise ConfigurationError(
            f"The whole module is a copy, and something in this one cannot be copied: {error}. Drop it before, or save "
            f"a checkpoint and load that into a new module."
        ) from error
    forget_division(whole)
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
