"""What stages send each other: shapes and dtypes, found by passing one microbatch through the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.strategy.model.sequential import StageModule
from lightning_pfo.strategy.parallel.compat import tree_leaves
from lightning_pfo.strategy.parallel.groups import global_rank


@dataclass(frozen=True)
class TensorSpec:
    """Shape, dtype and whether gradients flow back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorSpec:
        """Describe a tensor.

        Raises:
            ConfigurationError: If it is divided over processes.
        """
        if isinstance(tensor, DTensor):
            raise ConfigurationError(
                f"What a stage sends to the next one is a plain tensor; got a DTensor with placements "
                f"{tensor.placements}. Give the layer's plan use_local_output=True in configure_model, or move the "
                f"stage boundary with partition='custom:...'."
            )
        return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def make(self, device: torch.device) -> torch.Tensor:
        """Make such a tensor."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device, requires_grad=self.requires_grad)

    def make_buffer(self, device: torch.device) -> torch.Tensor:
        """Make a tensor to receive such a one, or its gradient."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class StageShapes:
    """What a stage receives (None: a microbatch index) and returns."""

    received: tuple[TensorSpec, ...] | None
    returned: tuple[TensorSpec, ...]

    def inputs(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Example inputs."""
        if self.received is None:
            return (torch.zeros(1, dtype=torch.long),)
        return tuple(spec.make(device) for spec in self.received)


def infer_shapes(
    modules: Mapping[int, StageModule],
    placement: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    before_forward: Callable[[int, int], None],
    train: bool,
) -> dict[int, StageShapes]:
    """Pass microbatch 0 through the stages one after the other and note shapes and dtypes; a collective call.

    torch can infer them itself, but by running forward and loss as if for real: it would update batch-norm statistics
    and call the user's step once more. Here buffers are put back, and a failure is reported on every rank.

    Args:
        modules: The stages of this rank.
        placement: Rank of every stage.
        device: Device of this rank.
        group: Process group of the pipeline.
        before_forward: Called with stage and microbatch before each forward.
        train: Whether gradients will flow back.

    Returns:
        The shapes of this rank's stages.

    Raises:
        PfoError: If a stage fails on another rank.
    """
    if any(module.takes_inputs_everywhere for module in modules.values()):
        _tell_what_to_send(modules, group, before_forward)
    received: tuple[TensorSpec, ...] | None = None
    is_tuple = False
    shapes: dict[int, StageShapes] = {}
    for stage, rank in enumerate(placement):
        message: list[Any] = [None]
        failure: Exception | None = None
        if stage in modules:
            try:
                modules[stage].receives_tuple = is_tuple
                before_forward(stage, 0)
                output = _trial_forward(modules[stage], StageShapes(received, ()).inputs(device), train)
                leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                message = [(isinstance(output, tuple), tuple(TensorSpec.of(leaf) for leaf in leaves))]
                shapes[stage] = StageShapes(received, message[0][1])
            except Exception as error:
                failure = error
                message = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(message, src=global_rank(group, rank), group=group)
        if failure is not None:
            raise failure
        if isinstance(message[0], str):
            raise PfoError(f"Stage {stage} failed on its first microbatch. {message[0]}")
        is_tuple, received = message[0]
    return shapes


def _tell_what_to_send(
    modules: Mapping[int, StageModule], group: dist.ProcessGroup | None, before_forward: Callable[[int, int], None]
) -> None:
    """Tell each stage what the next one has to receive."""
    received: dict[int, tuple[int, ...]] = {}
    failure: Exception | None = None
    try:
        for stage, module in modules.items():
            before_forward(stage, 0)
            received[stage] = module.find_received()
    except Exception as error:
        failure = error
    message = f"{type(failure).__name__}: {failure}" if failure is not None else ""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, (message, received), group=group)
    if failure is not None:
        raise failure
    failures = [f"Rank {rank} failed before its first layer. {text}" for rank, (text, _) in enumerate(found) if text]
    if failures:
        raise PfoError(failures[0])
    needed = {stage: positions for _, of_rank in found for stage, positions in of_rank.items()}
    for stage, module in modules.items():
        module.send(needed.get(stage + 1, ()))


def _trial_forward(module: StageModule, inputs: tuple[torch.Tensor, ...], train: bool) -> Any:
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    module.checks = True
    with torch.set_grad_enabled(train):
        output = module(*inputs)
    module.checks = False
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
    module.output = None
    return output
