"""Initial values: those of the first process, as under DDP.

Each process makes the whole model before it keeps the layers of its stages. Without a common seed, or where one of them
alone has loaded weights, a model put together of these parts would be nobody's.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.parallel.groups import checksum, copy_from, spread, tell_each_other

Mark = tuple[tuple[int, ...], torch.dtype, str]
"""Shape and type of a tensor, and a few numbers that its values come to."""


def copy_first_values(model: nn.Module, hosts: dist.ProcessGroup | None) -> None:
    """Give all processes the values that the first one has; a collective call.

    One message tells whether they have others, which is rare. A model that was divided before, or is made on the meta
    device, stays as it is.

    Args:
        model: The user's module.
        hosts: All processes, for tensors on the CPU.
    """
    tensors = named_tensors(model)
    whole = {name: tensor for name, tensor in tensors.items() if _has_values(tensor)}
    marks = {name: _mark_of(tensor) for name, tensor in whole.items()}
    code, lacks = zlib.crc32(repr(marks).encode()), any(tensor.is_meta for tensor in tensors.values())
    said = torch.tensor([code, -code, lacks], dtype=torch.int64)
    largest, smallest, anyone_lacks = spread(said, torch.maximum, hosts).tolist()
    if largest == -smallest or anyone_lacks:
        return
    everyone = tell_each_other(marks, hosts)
    for name in everyone[0]:
        found = {each.get(name) for each in everyone}
        forms = {mark and mark[:2] for mark in found}
        if len(found) > 1 and len(forms) == 1:
            value = whole[name].detach().cpu()
            copy_from(value, hosts)
            with torch.no_grad():
                whole[name].copy_(value)


def _has_values(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.layout == torch.strided


def _mark_of(tensor: torch.Tensor) -> Mark:
    values = tensor.detach()
    if values.dtype in _ADDED_UP:
        return tuple(tensor.shape), tensor.dtype, str(values.sum(dtype=torch.float64).item())
    return tuple(tensor.shape), tensor.dtype, str(checksum(values))


_ADDED_UP = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Of the others all bytes are looked at, in more time: integers may come to the same."""
