"""What one stage computes: the layers of an `nn.Sequential` one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import tree_leaves

ModuleInputs = tuple[tuple[Any, ...], dict[str, Any]]
"""What a user's step feeds to the model: positional and named arguments of its call."""


class StageModule(nn.Module):
    """The layers of one stage.

    The first stage is called with the index of a microbatch and looks its inputs up in `inputs`, so that a user's model
    may take any arguments. The last stage keeps its output in `output` in the form the model returned it.

    Args:
        layers: The layers.
        is_first: Whether this is the first stage.
        is_last: Whether this is the last stage.
    """

    takes_inputs_everywhere = False
    """Whether every stage, not only the first, is given the model's inputs."""

    def __init__(self, layers: Sequence[nn.Module], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.is_first = is_first
        self.is_last = is_last
        self.receives_tuple = False
        self.layout: Any = None
        self.checks = False
        self.inputs: Mapping[int, ModuleInputs] = {}
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
            return self.keep_output(value)
        if isinstance(value, torch.Tensor):
            return value.contiguous()  # gloo sends contiguous tensors only
        if isinstance(value, (tuple, list)) and value and all(isinstance(item, torch.Tensor) for item in value):
            return tuple(item.contiguous() for item in value)
        raise ConfigurationError(
            f"What a stage sends to the next one is a tensor or a tuple of tensors; layer "
            f"{type(self.layers[-1]).__name__} returned {type(value).__name__}. Change the layer's output, or move the "
            f"stage boundary with partition='custom:...'."
        )

    def find_received(self) -> tuple[int, ...]:
        """Find what the previous stage must send, where that depends on the inputs; begins a new `layout`."""
        return ()

    def send(self, positions: tuple[int, ...]) -> None:
        """Take what `find_received` of the next stage returned."""

    def keep_output(self, value: Any) -> Any:
        """Keep the model's output in `output`, and return its tensors."""
        self.output = value
        tensors = tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
        return tensors[0] if len(tensors) == 1 else tensors
