"""Checking that all pipeline ranks received the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import PackedSequence

from lightning_pfo.core.errors import has_other_batch
from lightning_pfo.strategy.compat.tensors import in_memory
from lightning_pfo.strategy.step.batches.structures import has_samples, leaves_of

_BITS = 64
_CHUNK = 1 << 20  # elements
_SAMPLED = 64
_SAMPLED_LEAVES = 32
_MIX = 0x1E3779B97F4A7C15
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Types of elements by their size in bytes."""


def checksum(batch: Any) -> int:
    """A number of 64 bits that differs if one element does, and with near certainty if several do, or their order."""
    total = 0
    for path, leaf in leaves_of(batch):
        if leaf is None:  # transformers' BatchFeature loses one of its attributes where it is pickled
            continue
        total = (total + zlib.crc32(path.encode())) * _MIX
        if isinstance(leaf, (str, bytes, int, float, np.generic)):
            total += zlib.crc32(repr(leaf).encode(errors="surrogatepass"))
        elif has_samples(leaf) and hasattr(leaf, "to_dict"):  # TensorDicts, graphs, tables
            total += checksum(leaf.to_dict())
        for tensor in _tensors_of(leaf):
            total = (total + zlib.crc32(str((tensor.dtype, *tensor.shape)).encode())) * _MIX + _sum_of(tensor)
    return total % (1 << _BITS)


def sample_of(batch: Any) -> int:
    """A number of 32 bits of some elements of a batch, to compare where it must cost nothing; no device is waited for.

    It tells of batches that are altogether others (other samples, another augmentation), not of each element.
    """
    code = 0
    for _, leaf in islice(leaves_of(batch), _SAMPLED_LEAVES):
        if isinstance(leaf, (str, bytes, int, float, np.generic)):
            told = leaf[:_SAMPLED] if isinstance(leaf, (str, bytes)) else leaf
            code = zlib.crc32(repr(told).encode(errors="surrogatepass"), code)
        elif type(leaf) is torch.Tensor and leaf.layout == torch.strided and not leaf.is_nested:
            code = zlib.crc32(bytes(map((0xFF).__and__, leaf.shape)), code)
            if leaf.device.type == "cpu" and leaf.is_contiguous() and not (leaf.is_quantized or leaf.is_complex()):
                elements = leaf.detach().view(-1)[:: 1 + leaf.numel() // _SAMPLED].contiguous()
                as_integers = elements.view(_INTEGERS[elements.element_size()])  # type: ignore[no-untyped-call]
                code = zlib.crc32(as_integers.numpy().data, code)
        elif isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            code = zlib.crc32(leaf.flat[:: 1 + leaf.size // _SAMPLED].tobytes(), code)
    return code


def _sum_of(tensor: torch.Tensor) -> int:
    """A sum of all elements, as the integers that their bits are, in arithmetic of 64 bits that loses none.

    The weights are odd, so no change of one element is multiplied to nothing, and neither equal nor periodic.
    """
    tensor = in_memory(tensor.detach())
    elements = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    weights = torch.arange(1, min(_CHUNK, elements.numel()) + 1, device=tensor.device) * _MIX
    weights = ((weights ^ (weights >> 29)) * _MIX) | 1
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for chunk in elements.view(_INTEGERS[elements.element_size()]).split(_CHUNK):  # type: ignore[no-untyped-call]
        total = total * _MIX + (chunk * weights[: len(chunk)]).sum()
    return int(total)


def _tensors_of(leaf: Any) -> Sequence[torch.Tensor]:
    if isinstance(leaf, PackedSequence):
        return [leaf.data, leaf.batch_sizes]
    if isinstance(leaf, np.ndarray):
        data = repr(leaf.tolist()).encode(errors="surrogatepass") if leaf.dtype.hasobject else leaf.tobytes()
        form = str((leaf.dtype, leaf.shape)).encode()
        return [torch.frombuffer(bytearray(form + data), dtype=torch.uint8)]
    if not isinstance(leaf, torch.Tensor):
        return []
    if leaf.is_nested:
        return leaf.unbind()
    if leaf.is_quantized:
        leaf = leaf.int_repr()
    return [leaf if leaf.layout == torch.strided else leaf.to_dense()]


def ranks_with_others(data: Any, group: dist.ProcessGroup | None, device: torch.device) -> list[int]:
    """The ranks that have other data than rank 0, bit by bit; a collective call."""
    if dist.get_world_size(group) == 1:
        return []
    value = checksum(data)
    mine = torch.tensor([value - (value >> (_BITS - 1) << _BITS)], device=device)  # with a sign
    sums = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sums, mine, group=group)
    values = [int(value) for value in sums]
    return [rank for rank, value in enumerate(values) if value != values[0]]


def check_same_batch(batch: Any, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare the batch with those of all other ranks; a collective call.

    Raises:
        BatchError: On every rank, if any rank has another batch.
    """
    different = ranks_with_others(batch, group, device)
    if different:
        raise has_other_batch(different)
