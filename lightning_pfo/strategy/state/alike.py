"""What several ranks hold alike, and a hook has then changed on one of them only.

An average of weights in buffers (`LitEma` of latent diffusion) is held by all ranks, and a hook brings it nearer to the
weights where these are: the ranks of their stages. What is saved, and found by another phase, is what that rank has.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.strategy.compat.modules import named_tensors, tensors_of
from lightning_pfo.strategy.parallel.groups import Shared, checksum, copy_from, tell_all, tell_each_other

_log = logging.getLogger(__name__)
_LOOKS = frozenset({2, *(4**power for power in range(1, 16))})
"""Numbers of the training steps before which weights are looked at: soon, and ever less often, as it takes a while."""
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
    _noted[module] = {n: checksum(t) for n, t in found.items() if not t.requires_grad and _is_comparable(t)}


def changed_in(module: nn.Module, local: Mapping[str, Any]) -> frozenset[str]:
    """Of what this rank holds, the names of what is not as all of them had it."""
    noted = _noted.get(module, {})
    both = ((name, local[name]) for name in noted if name in local)
    return frozenset(name for name, t in both if _is_comparable(t) and checksum(t) != noted[name])


def copy_latest(module: nn.Module, shared: Sequence[Shared], last_rank: int) -> None:
    """Give all who hold a tensor what one of them has; a collective call of the pipeline.

    A module that is built for another phase (validation after training) has what the first one has left: where a rank
    has changed a tensor since all had it alike, and others have not, it is that rank's. Else it is the first one's, of
    which all have the same, unless the module is new.

    Args:
        module: The user's module.
        shared: What ranks hold together.
        last_rank: The rank of the last stage, which runs whole steps.
    """
    tensors = named_tensors(module)
    for each in shared:
        told = _told(module, {name: tensors[name] for name in each.names}, each)
        for name in each.names:
            _copy(module, name, tensors[name], each, next(_having(name, each, told, last_rank), 0), told)
    note_alike(module, [name for each in shared for name in each.names])


def share_changed_buffers(module: nn.Module, shared: Sequence[Shared], last_rank: int) -> None:
    """Give all who hold a buffer what one of them has changed; a collective call of the pipeline.

    Where a step does something else than before, another rank may go on with it, as with a memory bank that was only
    filled so far. Buffers of the module itself are attributes, which all ranks have alike.

    Args:
        module: The user's module.
        shared: What ranks hold together.
        last_rank: The rank of the last stage, whose change counts where others have changed it too.
    """
    tensors = named_tensors(module)
    for each in shared:
        buffers = {n: tensors[n] for n in each.names if "." in n and not isinstance(tensors[n], nn.Parameter)}
        told = _told(module, buffers, each) if buffers else []
        for name, buffer in buffers.items():
            for source in islice(_having(name, each, told, last_rank), 1):
                with torch.inference_mode(False):
                    _copy(module, name, buffer, each, source, told)
                _noted[module] |= {name: checksum(named_tensors(module)[name])}


class AlikeWeights:
    """Looks now and then whether all who hold a weight have the same, and keeps it alike from when they have not.

    They change it by the same gradients. But an optimizer that draws noise draws other numbers on each rank, and a hook
    may reach one of them only.

    Args:
        module: The user's module.
        shared: What ranks hold together.
    """

    def __init__(self, module: nn.Module, shared: Sequence[Shared]) -> None:
        tensors = named_tensors(module)
        self._weights = [
            (each, {name: tensors[name] for name in each.names if isinstance(tensors[name], nn.Parameter)})
            for each in shared
        ]
        self._apart: set[str] = set()
        self._number = 0

    def keep(self) -> None:
        """A training step begins; a collective call of the pipeline."""
        self._number += 1
        for each, weights in self._weights:
            if self._number in _LOOKS:
                self._look(each, weights)
            for name in weights:
                if name in self._apart:
                    copy_from(weights[name].detach(), each.group, len(each.ranks) - 1)

    def _look(self, each: Shared, weights: Mapping[str, torch.Tensor]) -> None:
        # of a teacher that follows by a hook one rank alone may have what it is, see above
        trained = {n: w for n, w in weights.items() if w.requires_grad and _is_comparable(w)}
        mine = {name: checksum(weight) for name, weight in trained.items()}
        told = tell_each_other(mine, each.hosts) if mine else []
        apart = [name for name in mine if name not in self._apart and len({of_rank[name] for of_rank in told}) > 1]
        if not apart:
            return
        self._apart.update(apart)
        if dist.get_rank(each.hosts) > 0:
            return
        ranks = ", ".join(map(str, each.ranks))
        _log.warning(
            f"{', '.join(map(repr, apart))}: ranks {ranks} hold this weight, and no longer alike. What changes weights "
            f"beside the pipeline draws random numbers (noise in an optimizer or on gradients), or does so on some of "
            f"them only. From here on each training step begins with what rank {each.ranks[-1]} has. Let one stage "
            f"hold it (partition='custom:...'), or draw from a generator that is seeded by the name of a weight."
        )


class _Said(NamedTuple):
    """What a rank says of tensors that others hold too."""

    changed: frozenset[str]
    forms: dict[str, tuple[torch.Size, torch.dtype]]


def _told(module: nn.Module, held: Mapping[str, torch.Tensor], each: Shared) -> list[_Said]:
    forms = {name: (tensor.shape, tensor.dtype) for name, tensor in held.items()}
    return tell_each_other(_Said(changed_in(module, held), forms), each.hosts)


def _having(name: str, each: Shared, told: Sequence[_Said], last_rank: int) -> Iterator[int]:
    """Those of a group who have changed a tensor, the rank of the last stage first."""
    in_turn = sorted(range(len(told)), key=lambda rank: each.ranks[rank] != last_rank)
    return (rank for rank in in_turn if name in told[rank].changed)


def _copy(module: nn.Module, name: str, tensor: torch.Tensor, each: Shared, source: int, told: Sequence[_Said]) -> None:
    if len({said.forms[name] for said in told}) == 1:
        copy_from(tensor, each.group, source)
        return
    value = tell_all(tensor.detach().cpu(), each.hosts, source)  # a bank that is made when it is first filled
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        path, _, key = name.rpartition(".")
        tensors_of(module.get_submodule(path)).buffers[key] = value.to(tensor.device)


def _is_comparable(value: Any) -> bool:
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_tensor and not value.is_meta and value.layout == torch.strided
