"""Splitting a batch into microbatches, merging what comes back, and how many microbatches to use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.parallel.compat import tree_leaves, tree_map


def batch_size_of(batch: Any) -> int:
    """Return the common first dimension of all tensors in `batch` (0-dimensional tensors do not count).

    Raises:
        BatchError: If there is no such tensor, or first dimensions differ.
    """
    sizes = {leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0}
    if len(sizes) != 1:
        raise BatchError(
            "A batch is split along the first dimension of its tensors, which must be the same for all; got "
            f"{sorted(sizes) if sizes else 'no tensor'}. Give every tensor of the batch the batch size as its first "
            "dimension (0-dimensional tensors are passed to every microbatch as they are)."
        )
    return int(sizes.pop())


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split a nested batch into equal microbatches.

    Tensors are split along dimension 0 (views, no copy), and so are lists and tuples of strings or numbers as long as
    the batch; everything else is passed to every microbatch.

    Raises:
        BatchError: If the batch size is not a multiple of `num_microbatches`.
    """
    size = batch_size_of(batch)
    if size % num_microbatches:
        raise BatchError(not_divisible(f"A batch of {size} samples", size, num_microbatches))
    step = size // num_microbatches
    return [_slice(batch, size, start, start + step) for start in range(0, size, step)]


def first_samples(batch: Any, number: int) -> Any:
    """The first `number` samples of a batch, in the form in which `split_batch` gives them."""
    return _slice(batch, batch_size_of(batch), 0, number)


def not_divisible(what: str, size: int, num_microbatches: int) -> str:
    """The message for a batch size that does not divide."""
    fitting = [n for n in range(1, size + 1) if size % n == 0]
    nearest = min(fitting, key=lambda n: abs(n - num_microbatches))
    return (
        f"{what} cannot be divided into num_microbatches={num_microbatches} equal microbatches. Use "
        f"num_microbatches={nearest}, or a batch size that is a multiple of {num_microbatches} "
        f"(DataLoader(..., drop_last=True) leaves out a smaller last batch)."
    )


def _slice(value: Any, size: int, start: int, stop: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:stop] if value.dim() > 0 else value
    if isinstance(value, (list, tuple)):
        if len(value) == size and all(isinstance(item, (str, bytes, int, float)) for item in value):
            return value[start:stop]
        parts = [_slice(item, size, start, stop) for item in value]
        if isinstance(value, tuple):
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return parts
    if isinstance(value, Mapping):
        parts_by_key = {key: _slice(item, size, start, stop) for key, item in value.items()}
        return parts_by_key if type(value) is dict else type(value)(parts_by_key)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _slice(getattr(value, f.name), size, start, stop) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def merge_outputs(outputs: Sequence[Any]) -> Any:
    """Merge what a step returned for each microbatch.

    Tensors are concatenated along dimension 0, 0-dimensional tensors averaged; of anything else the last is kept.
    """

    def merge(*leaves: Any) -> Any:
        if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return torch.cat(leaves) if leaves[0].dim() > 0 else torch.stack(leaves).mean()
        return leaves[-1]

    return tree_map(merge, outputs[0], *outputs[1:])


def default_num_microbatches(batch_size: int, num_ranks: int, make_schedule: Callable[[int], PipelineSchedule]) -> int:
    """Choose how many microbatches a training batch is split into.

    More microbatches mean fewer bubbles (for 1F1B their share is (ranks - 1) / (microbatches + ranks - 1)), but less
    work for each instruction. Of the divisors of the batch size that the schedule can run, the largest up to four per
    rank is taken, else the smallest larger one.

    Raises:
        BatchError: If the schedule can run none of them.
    """
    divisors = [n for n in range(1, batch_size + 1) if batch_size % n == 0]
    preferred = [n for n in reversed(divisors) if n <= 4 * num_ranks] + [n for n in divisors if n > 4 * num_ranks]
    reason: ConfigurationError | None = None
    for number in preferred:
        try:
            make_schedule(number)
        except ConfigurationError as error:
            reason = reason or error
        else:
            return number
    raise BatchError(
        f"A batch of {batch_size} samples cannot be divided into microbatches that the schedule can run: {reason} "
        f"Use a batch size that is a multiple of {4 * num_ranks}."
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


def can_be_read_again(loaders: Any) -> bool:
    """Whether a batch can be taken from loaders with nothing missing in training: datasets are looked up by index."""
    leaves = tree_leaves(loaders, is_leaf=lambda node: isinstance(node, DataLoader))
    return bool(leaves) and all(
        isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset) for loader in leaves
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
