"""What several ranks hold alike, and a hook has then changed on one of them only.

An average of weights in buffers (`LitEma` of latent diffusion) is held by all ranks, and a hook brings it nearer to the
weights where these are: the ranks of their stages. What is saved, and found by another phase, is what that rank has.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.parallel.compat import named_tensors
from lightning_pfo.strategy.parallel.groups import Shared, copy_from, tell_each_other

_noted: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()


def note_alike(module: nn.Module, names: Iterable[str] | None = None) -> None:
    """Remember what ranks hold alike now.

    Args:
        module: The user's module.
        names: Of its parameters and buffers; None: those of before, whose values are others now.
    """
    names = _noted.get(module, ()) if names is None else names
    tensors = named_tensors(module)
    found = {name: tensors[name] for name in names if name in tensors}
    # what is trained changes on all of them, by the same gradients
    _noted[module] = {n: _checksum(t) for n, t in found.items() if not t.requires_grad and _is_comparable(t)}


def changed_in(module: nn.Module, local: Mapping[str, Any]) -> frozenset[str]:
    """Of what this rank holds, the names of what is not as all of them had it."""
    noted = _noted.get(module, {})
    both = ((name, local[name]) for name in noted if name in local)
    return frozenset(name for name, t in both if _is_comparable(t) and _checksum(t) != noted[name])


def copy_latest(module: nn.Module, shared: Sequence[Shared], last_rank: int) -> None:
    """Give all who hold a tensor what one of them has; a collective call of the pipeline.

    A module that is built for another phase (validation after training) has what the first one has left: where a rank
    has changed a tensor since all had it alike, and others have not, it is that rank's. A new one has what the first
    rank has made.

    Args:
        module: The user's module.
        shared: What ranks hold together.
        last_rank: The rank of the last stage, which runs whole steps.
    """
    tensors = named_tensors(module)
    for each in shared:
        own = {name: tensors[name] for name in each.names}
        told = tell_each_other((module in _noted, changed_in(module, own)), each.hosts)
        in_turn = sorted(range(len(told)), key=lambda rank: each.ranks[rank] != last_rank)
        first = in_turn[0] if all(is_known for is_known, _ in told) else 0
        for name, tensor in own.items():
            copy_from(tensor, each.group, next((rank for rank in in_turn if name in told[rank][1]), first))


def _is_comparable(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor and not value.is_meta and value.layout == torch.strided


def _checksum(tensor: torch.Tensor) -> int:
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(content)
