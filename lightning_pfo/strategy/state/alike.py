"""What several ranks hold alike, and a hook has then changed on one of them only.

An average of weights in buffers (`LitEma` of latent diffusion) is held by all ranks, and a hook brings it nearer to the
weights where these are: the ranks of their stages. What is saved is what that rank has.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.parallel.compat import named_tensors

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


def _is_comparable(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor and not value.is_meta and value.layout == torch.strided


def _checksum(tensor: torch.Tensor) -> int:
    content: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return zlib.crc32(content)
