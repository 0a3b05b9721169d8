"""How many microbatches to use. What divides batches and puts outputs together is in `batches`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.parallel.compat import tree_leaves
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.splitting import Microbatches, batch_size_of, first_samples
from lightning_pfo.strategy.step.batches.splitting import split_batch as split_unevenly

__all__ = [
    "batch_size_of",
    "check_batch_sizes",
    "default_num_microbatches",
    "evaluation_num_microbatches",
    "first_samples",
    "merge_outputs",
    "not_divisible",
    "split_batch",
    "training_batch_sizes",
]

_PER_RANK = 4


def split_batch(batch: Any, num_microbatches: int) -> Microbatches:
    """Split a batch into equal microbatches, for an engine that runs no others; see `batches.splitting.split_batch`.

    Raises:
        BatchError: If the batch size is not a multiple of `num_microbatches`, or the batch cannot be split.
    """
    parts = split_unevenly(batch, num_microbatches)
    if len(parts) < num_microbatches or len(set(parts.sizes)) > 1:
        raise BatchError(not_divisible(f"A batch of {parts.size} samples", parts.size, num_microbatches))
    return parts


def default_num_microbatches(batch_size: int, num_ranks: int, make_schedule: Callable[[int], PipelineSchedule]) -> int:
    """Choose how many microbatches a training batch is split into.

    More microbatches mean fewer bubbles (for 1F1B their share is (ranks - 1) / (microbatches + ranks - 1)), but less
    work for each instruction; four per rank are wanted. Of the numbers that the schedule can run, this takes the first
    of: divisors of the batch size, from four per rank down to two, then up to eight, since equal microbatches take
    equal times; other numbers, from four per rank down to two; all others, those nearest to four per rank first.

    Raises:
        BatchError: If the schedule can run none up to the batch size.
    """
    wanted = _PER_RANK * num_ranks
    numbers = range(1, batch_size + 1)
    near = [n for n in reversed(numbers) if wanted // 2 <= n <= wanted]
    above = [n for n in numbers if wanted < n <= 2 * wanted]
    divisors = [n for n in [*near, *above] if batch_size % n == 0]
    nearest = sorted(numbers, key=lambda n: abs(n - wanted))
    reason: ConfigurationError | None = None
    for number in dict.fromkeys([*divisors, *near, *nearest]):
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


def evaluation_num_microbatches(batch_size: int, preferred: int) -> int:
    """The largest divisor of `batch_size` up to `preferred`: evaluation has no minimum, so that any batch works."""
    return max(n for n in range(1, preferred + 1) if batch_size % n == 0)


def training_batch_sizes(loaders: Any, num_batches: float) -> list[int]:
    """List the batch sizes that DataLoaders will yield, as far as they can be known beforehand.

    Args:
        loaders: A DataLoader, or several in lists and dicts; other iterables are skipped.
        num_batches: How many batches of an epoch are used.

    Returns:
        For each loader its batch size, followed by that of a smaller last batch if there is one.
    """
    sizes: list[int] = []
    for loader in tree_leaves(loaders, is_leaf=lambda node: hasattr(node, "batch_sampler")):
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            continue
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            continue
        sizes.append(size)
        sampler = getattr(loader.batch_sampler, "sampler", None)
        drop_last = getattr(loader.batch_sampler, "drop_last", True)
        if drop_last or sampler is None or not hasattr(sampler, "__len__"):
            continue
        remainder = len(sampler) % size
        if remainder and num_batches > len(sampler) // size:
            sizes.append(remainder)
    return sizes


def not_divisible(what: str, size: int, num_microbatches: int) -> str:
    """The message for a batch size that does not divide."""
    fitting = [n for n in range(1, size + 1) if size % n == 0]
    nearest = min(fitting, key=lambda n: abs(n - num_microbatches))
    return (
        f"{what} cannot be divided into num_microbatches={num_microbatches} equal microbatches. Use "
        f"num_microbatches={nearest}, or a batch size that is a multiple of {num_microbatches} "
        f"(DataLoader(..., drop_last=True) leaves out a smaller last batch)."
    )


def check_batch_sizes(sizes: Sequence[int], num_microbatches: int) -> None:
    """Check that training batches can be divided; the largest is the ordinary one.

    Raises:
        BatchError: If one cannot.
    """
    for size in sizes:
        if size % num_microbatches:
            what = f"A training batch of {size} samples"
            what += " (the last, smaller one)" if size < max(sizes) else ""
            raise BatchError(not_divisible(what, size, num_microbatches))
