"""An example of a batch, by which a model is divided: what its call does with a first microbatch is traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.microbatches import can_be_read_again


def first_batch(loader: Any, device: torch.device) -> Any:
    """A batch of a loader that training does not miss; None where it might."""
    if not can_be_read_again(loader):
        return None
    with random_state.isolated(device):  # a loader draws numbers for its workers and its order
        return next(iter(loader), None)


def first_microbatch(example: Any, batching: Batching, num_microbatches: Callable[[Any], int]) -> Any:
    """The first microbatch of an example, as arguments and named arguments of the call.

    Args:
        example: A batch as the call takes it: a tuple of its arguments, a dict of named ones, or one argument.
        batching: How it is divided.
        num_microbatches: How many microbatches a batch is divided into.
    """
    if isinstance(example, Mapping):
        batch: Any = ((), dict(example))
    else:
        batch = (tuple(example) if isinstance(example, (tuple, list)) else (example,), {})
    return batching.split(batch, num_microbatches(batch))[0]
