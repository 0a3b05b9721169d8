"""How many microbatches to use. What divides batches and puts outputs together is in `batches`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.compat.tensors import tree_leaves

_PER_RANK = 4


def default_num_microbatches(
    batch_size: int, num_ranks: int, make_schedule: Callable[[int], PipelineSchedule], least_samples: int = 1
) -> int:
    """Choose how many microbatches a training batch is split into.

    More microbatches mean fewer bubbles (for 1F1B their share is (ranks - 1) / (microbatches + ranks - 1)), but less
    work for each instruction; four per rank are wanted, and of a single rank, which has no bubbles, one. Of the numbers
    that the schedule can run, this takes the first of: divisors of the batch size, from four per rank down to two, then
    up to eight, since equal microbatches take equal times; other numbers, from four per rank down to two; all others,
    those nearest to four per rank first. Where a batch has not that many samples it is the least number that the
    schedule can run: each batch is a short one, of which `too_few_samples` tells.

    Args:
        batch_size: Number of samples.
        num_ranks: Number of ranks of the pipeline.
        make_schedule: Makes the schedule for a number of microbatches.
        least_samples: So many samples a microbatch should have, if batches have as many; see `batch_norm`.

    Raises:
        BatchError: If the schedule can run none up to four per rank.
    """
    wanted = _PER_RANK * num_ranks if num_ranks > 1 else 1
    numbers = range(1, max(1, batch_size // least_samples) + 1)
    near = [n for n in reversed(numbers) if wanted // 2 <= n <= wanted]
    above = [n for n in numbers if wanted < n <= 2 * wanted]
    divisors = [n for n in [*near, *above] if batch_size % n == 0]
    nearest = sorted(numbers, key=lambda n: abs(n - wanted))
    reason: ConfigurationError | None = None
    tried: list[int] = [*divisors, *near, *nearest, *range(numbers.stop, wanted + 1)]
    for number in dict.fromkeys(tried):
        try:
            make_schedule(number)
        except ConfigurationError as error:
            reason = reason or error
        else:
            return number
    raise BatchError(
        f"A batch of {batch_size} samples cannot be divided into microbatches that the schedule can run: {reason} "
        f"Use batches of {wanted} samples."
    )


def too_few_samples(batch_size: int, num_microbatches: int, num_ranks: int) -> str:
    """What is said of batches that have fewer samples than the schedule runs microbatches; nothing of others."""
    if batch_size >= num_microbatches:
        return ""
    return (
        f"A batch of {counted(batch_size, 'sample')} is too small for a pipeline of {counted(num_ranks, 'rank')}: it "
        f"is trained in fewer microbatches than the {num_microbatches} that the schedule runs, so ranks wait for each "
        f"other, no plan is applied and nothing is profiled. Use batches of {_PER_RANK * num_ranks} samples."
    )


def evaluation_microbatches(batch_size: int | None, num_microbatches: int | None, num_ranks: int) -> int:
    """Choose how many microbatches a batch is split into that is only run forward.

    Args:
        batch_size: Number of samples; None is not known.
        num_microbatches: The number in training, if it is known.
        num_ranks: Number of ranks of the pipeline.

    Returns:
        As many, but with two samples each at least: what a step returns of one sample looks the same whether it is
        one value of the batch or one for each sample.
    """
    wanted = num_microbatches or (_PER_RANK * num_ranks if num_ranks > 1 else 1)
    return wanted if batch_size is None else max(1, min(wanted, batch_size // 2))


def shapes_of(microbatch: Any) -> str:
    """Types and shapes of its tensors, such as `int64[2, 1024], float32[2]`."""
    tensors = [leaf for leaf in tree_leaves(microbatch) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(one.dtype).removeprefix('torch.')}{_sizes_of(one)}" for one in tensors)


def _sizes_of(tensor: torch.Tensor) -> list[Any]:
    if not tensor.is_nested:
        return list(tensor.shape)
    return [list(row.shape) for row in tensor.unbind()]


def declared_batch_size(loaders: Any) -> int | None:
    """How many samples a batch will have, as DataLoaders say beforehand.

    Args:
        loaders: A DataLoader, or several in lists and dicts, of which the first that knows is asked.

    Returns:
        The number; None if that is not known, as where a `collate_fn` may make batches of any size.
    """
    for loader in tree_leaves(loaders, is_leaf=lambda node: isinstance(node, DataLoader)):
        if isinstance(loader, DataLoader) and loader.collate_fn is default_collate:
            size = getattr(loader.batch_sampler, "batch_size", None)
            if isinstance(size, int):
                return size
    return None


def declared_sizes(loaders: Any) -> frozenset[int]:
    """How many samples batches may have, as DataLoaders say: as many as they collect, or as remain for a last one.

    Args:
        loaders: DataLoaders, in lists and dicts.
    """
    found = set()
    for loader in tree_leaves(loaders, is_leaf=lambda node: hasattr(node, "batch_sampler")):
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
        if isinstance(size, int) and size > 0:
            found.add(size)
            with suppress(TypeError, NotImplementedError):  # of samplers without a length
                found.add(len(loader.sampler) % size)
    return frozenset(found - {0})
