"""What stands in state dicts for tensors of other ranks: it has a name, a shape and a place, but nobody can save it.

A module whose parts lie on several ranks has tensors on the meta device in their places. Torch writes those to a file
without a word, so each state dict, also that of a part of the module, marks them. An optimizer's has no entries in
their places, and is marked as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import tree_leaves
from lightning_pfo.strategy.parallel.dtensor import is_written_from_nowhere, lacks_values

_REFUSAL = (
    "This state dict has placeholders for tensors of other ranks, whose values are not here to be saved, moved or "
    "compared. Call one of these on every rank, and save what it gives the first: accelerator.get_state_dict(model), "
    "in a plain loop model.full_state_dict(), under Lightning trainer.strategy.gather_module() (or "
    "trainer.save_checkpoint(path)). To move values from one module to another, or compare them, enter on every rank, "
    "in a loop of your own, `with model.whole_parameters():` (of two, `with one.whole_parameters(), "
    "other.whole_parameters():`), under Lightning `with trainer.strategy.whole_parameters(one, other):`."
)

_REFUSAL_OF_PART = (
    "This state of an optimizer is that of one rank's parameters: whoever loads it begins anew with all others. Call "
    "model.full_optimizer_state(optimizer) on every rank, save what it gives the first, and load that by "
    "model.load_optimizer_state(optimizer, state). Of an optimizer that Accelerate has prepared, state_dict() and "
    "load_state_dict() do so."
)


class Placeholder(torch.Tensor):
    """A tensor of another rank in a state dict; refuses whatever needs its values."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(_REFUSAL)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.clone())
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_written_from_nowhere(func, args, kwargs or {}, _is_missing):
            raise ConfigurationError(_REFUSAL)
        try:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        except (RuntimeError, TypeError) as error:
            if not lacks_values(error):
                raise
            raise ConfigurationError(_REFUSAL) from error


def _is_missing(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


_handles: WeakKeyDictionary[nn.Module, RemovableHandle] = WeakKeyDictionary()


def refuse_saving(root: nn.Module) -> None:
    """Let state dicts of a module, and of its parts, have a `Placeholder` for each tensor on the meta device.

    That lasts as long as the module: without its pipeline it has them, too.
    """
    for module in root.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if module not in _handles and any(tensor.is_meta for tensor in own):
            _handles[module] = module.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]


@contextmanager
def unmarked(root: nn.Module) -> Iterator[None]:
    """Let a module be as it was, for a copy of it that is whole."""
    marked = [module for module in root.modules() if module in _handles]
    for module in marked:
        _handles.pop(module).remove()
    try:
        yield
    finally:
        refuse_saving(root)


def _mark(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    own = tensors_of(module)
    for name in (*own.parameters, *own.buffers):
        value = state.get(prefix + name)
        # with `keep_vars` parameters are the module's own; parts of tensor parallelism know how they are divided
        is_other = not isinstance(value, (nn.Parameter, Placeholder, DTensor))
        if isinstance(value, torch.Tensor) and is_other and value.is_meta:
            if value.layout != torch.strided:  # sparse ones have no other classes
                value = torch.empty(value.shape, dtype=value.dtype, device=value.device)
            state[prefix + name] = value.as_subclass(Placeholder)


class PartOfState(dict[Any, Any]):
    """What an optimizer's state dict has of parameters on this rank; it goes back into the optimizer, not to a file."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(_REFUSAL_OF_PART)

    def __copy__(self) -> PartOfState:
        return PartOfState(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartOfState:
        return PartOfState(copy.deepcopy(dict(self), memo))


def refuse_saving_part(optimizer: Optimizer) -> None:
    """Let state dicts of an optimizer with parameters on the meta device have a `PartOfState`, if they have any."""
    optimizer.register_state_dict_post_hook(_mark_part)


def what_is_lacking(state: Mapping[str, Any]) -> str | None:
    """Why other ranks cannot take a state, of a module or an optimizer; None if it has all its values."""
    leaves = tree_leaves(dict(state))
    if any(isinstance(leaf, PartOfState) or _is_missing(leaf) for leaf in leaves):
        return _REFUSAL_OF_PART if "param_groups" in state else _REFUSAL
    return None


def _mark_part(optimizer: Optimizer, state: dict[str, Any]) -> None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if state.get("state") and any(each.is_meta and each.requires_grad for each in parameters):
        state["state"] = PartOfState(state["state"])
