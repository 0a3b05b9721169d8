"""What a module returns, in form: found without its values and without computing."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from lightning_pfo.strategy.parallel.compat import (
    FakeTensorMode,
    tensors_of,
    tree_flatten,
    tree_unflatten,
    version_of,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Same:
    """A result that is one of the arguments.

    Attributes:
        argument: Which, of all leaves of the arguments.
    """

    argument: int


@dataclass(frozen=True)
class Outline:
    """What a call returns, in form.

    Attributes:
        leaves: Of what it returns, flattened: forms of tensors (without values), `Same`, or anything else.
        structure: What puts the leaves together.
        changed: The arguments that are tensors and are changed in place.
    """

    leaves: list[Any]
    structure: Any
    changed: list[int]


class _Bare(nn.Module):
    """Calls a function in place of a module's `forward`, with the module's tensors replaced."""

    def __init__(self, module: nn.Module, forward: Any) -> None:
        super().__init__()
        self.module = module
        self.__dict__["_forward"] = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_forward"](*args, **kwargs)


def outline_call(
    module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> Outline:
    """Find what a call returns, with tensors that have no values; parameters may be anywhere, or nowhere.

    Where the form of the result depends on values, it is taken to be that of the first tensor among the arguments, as
    it is for most layers.

    Args:
        module: The module.
        forward: Its `forward`.
        args: Arguments; ordinary tensors.
        kwargs: Named arguments.
        device: Where the module runs.
    """
    if device.type == "cpu":
        device = torch.device("cpu")  # "cpu:0" would be another device than that of the parameters
    leaves, structure = tree_flatten((args, kwargs))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = [mode.from_tensor(_on(leaf, device)) if _is_tensor(leaf) else _copied(leaf) for leaf in leaves]
    versions = [version_of(leaf) if _is_tensor(leaf) else 0 for leaf in inputs]
    positions = {id(leaf): index for index, leaf in enumerate(inputs) if _is_tensor(leaf)}
    bare = _Bare(module, forward)
    try:
        with mode:
            # each module once: torch would not put back the tensors of a module that is held in two places
            tensors = {
                f"{path}.{name}": torch.empty(tensor.shape, dtype=tensor.dtype, device=device).requires_grad_(
                    tensor.requires_grad
                )
                for path, part in bare.named_modules()
                for name, tensor in (item for named in tensors_of(part) for item in named.items())
                if tensor is not None
            }
            args, kwargs = tree_unflatten(inputs, structure)
            result = functional_call(bare, tensors, args, kwargs, tie_weights=False)
    except Exception as error:
        _log.debug("%s does not run without values: %s", type(module).__name__, error, exc_info=True)
        result = next((leaf for leaf in inputs if _is_tensor(leaf) and leaf.is_floating_point()), None)
        if result is None:
            raise
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
            result = result.detach().requires_grad_()
        else:
            result = result.detach()
    found, structure = tree_flatten(result)
    found = [Same(positions[id(leaf)]) if id(leaf) in positions else leaf for leaf in found]
    changed = [
        index
        for index, (leaf, version) in enumerate(zip(inputs, versions, strict=True))
        if _is_tensor(leaf) and version_of(leaf) != version
    ]
    return Outline(found, structure, changed)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _on(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)  # a cache for keys and values would remember forms without values
    except Exception:
        return value
