"""Finding the submodule to split, and the part of it that one stage runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_pfo.core.errors import ConfigurationError


def find_pipelined_module(root: nn.Module, name: str | None = None) -> tuple[str, nn.Sequential]:
    """Find the `nn.Sequential` to split.

    Args:
        root: The user's module, e.g. a LightningModule.
        name: Dotted name of the submodule; None searches: the one `nn.Sequential` among the children of `root`, or else
            among the children of these.

    Returns:
        The dotted name and the module.

    Raises:
        ConfigurationError: If the name is wrong, or the search finds nothing or several; lists the candidates.
    """
    if name is not None:
        try:
            module = root.get_submodule(name)
        except AttributeError:
            module = None
        if not name or not isinstance(module, nn.Sequential):
            found = "nothing" if module is None else f"a {type(module).__name__}"
            raise ConfigurationError(
                f"pipeline_module names an nn.Sequential of {type(root).__name__}; {name!r} is {found}. "
                f"{_candidates(root)}"
            )
        return name, module
    level: list[tuple[str, nn.Module]] = list(root.named_children())
    for _ in range(2):
        found_here = [(path, module) for path, module in level if isinstance(module, nn.Sequential)]
        if len(found_here) == 1:
            return found_here[0]
        if found_here:
            raise ConfigurationError(
                f"{type(root).__name__} has more than one nn.Sequential, so which to split into stages is ambiguous. "
                f"Name it: PfoPipelineStrategy(pipeline_module={found_here[0][0]!r}). {_candidates(root)}"
            )
        level = [(f"{path}.{child}", module) for path, parent in level for child, module in parent.named_children()]
    raise ConfigurationError(
        f"{type(root).__name__} has no nn.Sequential to split into stages. Hold the layers in one, e.g. self.model = "
        f"nn.Sequential(...), or name it with PfoPipelineStrategy(pipeline_module=...). {_candidates(root)}"
    )


def _candidates(root: nn.Module) -> str:
    names = [
        f"{path!r} ({len(module)} layers)"
        for path, module in root.named_modules()
        if path and isinstance(module, nn.Sequential)
    ]
    return f"Candidates: {', '.join(names)}." if names else "It contains no nn.Sequential at all."


class StageModule(nn.Module):
    """The layers of one stage.

    The first stage is called with the index of a microbatch and looks its inputs up in `inputs`, so that a user's model
    may take any arguments. The last stage keeps its output in `output` in the form the model returned it.

    Args:
        layers: The layers.
        is_first: Whether this is the first stage.
        is_last: Whether this is the last stage.
        loss_parameters: On the last stage, parameters outside the layers that the loss may use. torch asks the module
            for its parameters when it computes weight gradients on their own.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        *,
        is_first: bool,
        is_last: bool,
        loss_parameters: Sequence[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.loss_parameters = nn.ParameterList(loss_parameters)
        self.layers = nn.ModuleList(layers)
        self.is_first = is_first
        self.is_last = is_last
        self.receives_tuple = False
        self.inputs: Mapping[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.output: Any = None

    def forward(self, *args: torch.Tensor) -> Any:
        """Run the layers on a microbatch index (first stage) or on what the previous stage sent."""
        layers = iter(self.layers)
        if self.is_first:
            user_args, user_kwargs = self.inputs[int(args[0])]
            value = next(layers)(*user_args, **user_kwargs)
        else:
            value = args if self.receives_tuple else args[0]
        for layer in layers:
            value = layer(value)
        if self.is_last:
            self.output = value
            tensors = tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
            return tensors[0] if len(tensors) == 1 else tensors
        if isinstance(value, torch.Tensor):
            return value.contiguous()  # gloo sends contiguous tensors only
        if isinstance(value, (tuple, list)) and value and all(isinstance(item, torch.Tensor) for item in value):
            return tuple(item.contiguous() for item in value)
        raise ConfigurationError(
            f"What a stage sends to the next one is a tensor or a tuple of tensors; layer "
            f"{type(self.layers[-1]).__name__} returned {type(value).__name__}. Change the layer's output, or move the "
            f"stage boundary with partition='custom:...'."
        )
