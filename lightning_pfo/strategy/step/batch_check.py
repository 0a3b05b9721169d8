"""Checking that all pipeline ranks received the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.step.batches.structures import has_samples, leaves_of


def checksum(batch: Any) -> float:
    """A number that differs, with near certainty, for batches of other values, order or shapes."""
    total = 0.0
    for position, (_, leaf) in enumerate(leaves_of(batch), start=1):
        if isinstance(leaf, str):
            total += position * zlib.crc32(leaf.encode(errors="surrogatepass")) / 2**32
        elif isinstance(leaf, (int, float)):
            total += position * float(leaf)
        elif has_samples(leaf) and hasattr(leaf, "to_dict"):  # TensorDicts, graphs, tables
            total += position * checksum(leaf.to_dict())
        for tensor in _tensors_of(leaf):
            values = torch.nan_to_num(tensor.detach().to(torch.float64)).flatten()
            # weights that are neither equal nor periodic, so that a permutation changes the sum
            weights = torch.frac(torch.arange(1, values.numel() + 1, device=values.device) * 0.6180339887498949)
            total += position * float(values @ weights.to(torch.float64)) + sum(tensor.shape)
    return total


def _tensors_of(leaf: Any) -> Sequence[torch.Tensor]:
    if isinstance(leaf, PackedSequence):
        return [leaf.data, leaf.batch_sizes]
    if isinstance(leaf, np.ndarray):
        return [torch.from_numpy(leaf.astype(np.float64))] if leaf.dtype.kind in "biuf" else []
    if not isinstance(leaf, torch.Tensor):
        return []
    if leaf.is_nested:
        return leaf.unbind()
    return [leaf if leaf.layout == torch.strided else leaf.to_dense()]


def check_same_batch(batch: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the batch with those of all other ranks; a collective call.

    Raises:
        BatchError: On every rank, if any rank has another batch.
    """
    mine = torch.tensor([checksum(batch)], dtype=torch.float64, device=device)
    sums = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sums, mine, group=group)
    values = [float(value) for value in sums]
    if len(set(values)) > 1:
        different = [rank for rank, value in enumerate(values) if value != values[0]]
        raise BatchError(
            f"All pipeline ranks work on the same batch, but ranks {different} received another one than rank 0. Make "
            f"the data pipeline deterministic: give the sampler a generator with a fixed seed, seed processes "
            f"alike (lightning.seed_everything(seed, workers=True), accelerate.utils.set_seed(seed)), and do not let "
            f"ranks read different data."
        )
