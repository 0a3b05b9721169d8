"""One call of a model: what comes of its arguments, and into how many microbatches they are divided.

What the call does with a first microbatch is traced, and shows how the model is divided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import listed, shortened
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.model.batch_norm import least_samples
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.structures import has_samples, leaves_of
from lightning_pfo.strategy.step.effects.fresh import anew
from lightning_pfo.strategy.step.first_batch.ahead import read_ahead
from lightning_pfo.strategy.step.microbatches import (
    default_num_microbatches,
    evaluation_microbatches,
    too_few_samples,
)

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, and the named ones."""
ARGUMENTS = frozenset({"batch", "batch[0]"})
"""Where the arguments are in it: they are parts of the batch, never a list of its samples."""


@dataclass
class ModelCall:
    """What a pipelined model runs for its caller.

    Attributes:
        module: The user's module.
        loss_fn: `loss_fn(output, target)`; None: the module computes the loss.
        batching: How batches are divided.
        num_ranks: Ranks of the pipeline.
        make_schedule: Makes the schedule of training iterations for a number of microbatches.
        num_microbatches: Microbatches of a training batch; None until the first batch.
    """

    module: nn.Module
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    batching: Batching
    num_ranks: int
    make_schedule: Callable[[int], PipelineSchedule]
    num_microbatches: int | None

    def check(self, batch: Batch) -> None:
        """Check that a call has what a loss is made from.

        Raises:
            ConfigurationError: If there is nothing beside a target.
        """
        args, kwargs = batch
        if self.loss_fn is not None and not (args and (len(args) > 1 or kwargs)):
            given = listed([*(type(arg).__name__ for arg in args), *(f"{name}=..." for name in kwargs)]) or "nothing"
            raise ConfigurationError(
                f"With a loss_fn the call of the model takes its inputs, and last, by position, the target: "
                f"loss = model(x, y), of which loss_fn is part; got {given}. Outputs without a target: "
                f"model.predict(x)."
            )

    def loss(self, batch: Batch) -> Any:
        """The loss of a batch, or outputs with it."""
        if self.loss_fn is None:
            return self.output(batch)
        (*inputs, target), kwargs = batch
        return self.loss_fn(self.module(*inputs, **kwargs), target)

    def evaluated(self, batch: Batch) -> Any:
        """The same without the caches of transformers' models, which would be sent from stage to stage for nothing."""
        found = self.loss(batch)
        if isinstance(found, Mapping) and "loss" in found:
            return {key: None if key == "past_key_values" else value for key, value in found.items()}
        return found

    def output(self, batch: Batch) -> Any:
        """What the module returns for a batch without a target."""
        args, kwargs = batch
        return self.module(*args, **kwargs)

    def first_step(self, example: Any) -> Callable[[torch.device], Any] | None:
        """What runs the first microbatch of an example, on a device; None without an example.

        Args:
            example: A batch as the call takes it: a tuple of its arguments, a dict of named ones, or one argument.
        """
        if example is None:
            return None
        batch: Batch = (tuple(example) if isinstance(example, (tuple, list)) else (example,), {})
        if isinstance(example, Mapping):
            batch = ((), dict(example))
        microbatch = self.batching.split(batch, self.of_training(batch))[0]

        def step(device: torch.device) -> Any:
            own = anew(microbatch, copies=True)  # it is run several times
            return self.loss(tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), own))

        return step

    def of_training(self, batch: Batch) -> int:
        """The number of microbatches of a training batch."""
        if self.num_microbatches is not None:
            return self.num_microbatches
        size = self.batching.size_of(batch, is_divided=self.num_ranks > 1)
        number = default_num_microbatches(size, self.num_ranks, self.make_schedule, least_samples(self.module))
        if said := too_few_samples(size, number, self.num_ranks):
            warn_once(said)
        return number

    def of_evaluation(self, batch: Batch) -> int:
        """The number of microbatches of a batch that is only run forward."""
        return evaluation_microbatches(self.batching.evaluation_size_of(batch), self.num_microbatches, self.num_ranks)


def check_example(example: Any) -> None:
    """Check that an example may be a batch, before anything is made of it.

    Raises:
        ConfigurationError: If nothing in it may have samples.
    """
    if isinstance(example, Mapping):
        arguments = list(example.values())
    else:
        arguments = list(example) if isinstance(example, (tuple, list)) else [example]
    if example is None or any(map(_may_have_samples, arguments)):
        return
    raise ConfigurationError(
        f"example_batch is a batch as the call of the model takes it: a tuple of its arguments, example_batch=(x, y), "
        f"or a dict of named ones; one of them has samples, as a tensor or a list. Got {shortened(example)}."
    )


def _may_have_samples(argument: Any) -> bool:
    if isinstance(argument, (str, bytes)):
        return False
    has_items = hasattr(type(argument), "__getitem__") and hasattr(type(argument), "__len__")
    return has_items or any(has_samples(leaf) for _, leaf in leaves_of(argument))


def first_batch(loader: Any, model: nn.Module, device: torch.device) -> Any:
    """A batch of a loader that training does not miss; None where it would."""
    if loader is None:
        return None
    loader = getattr(loader, "base_dataloader", loader)  # Accelerate's own would be taken for one that is gone through
    with random_state.isolated(device), read_ahead(loader, [loader], [model]) as source:
        return next(iter(source), None) if source is not None else None
