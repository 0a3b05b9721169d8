"""Buffers that training changes: replicas go on with those of the first, as under DDP (`broadcast_buffers`).

As there, replicas that accumulate gradients have buffers of their own until the gradients are averaged.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import TypeIs

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import change_mark
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.parallel.groups import as_bytes, global_rank, spread


class ReplicaBuffers:
    """Gives all replicas the first one's buffers, if any has changed them.

    Args:
        module: The user's module, with what this rank holds of it.
        group: The processes with the same stages in other replicas.
        hosts: The same, for tensors on the CPU.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, hosts: dist.ProcessGroup | None) -> None:
        self._group, self._hosts = group, hosts
        registries = [tensors_of(each).buffers for each in module.modules()]
        self._places = [(buffers, key) for buffers in registries for key, value in buffers.items() if _is_held(value)]
        self._marks = self._marks_now()

    def keep(self) -> None:
        """Look for changes and copy what has changed; a collective call of all replicas."""
        if not self._places:
            return
        buffers = [registry.get(key) for registry, key in self._places]
        own = [local(each.detach()) if _is_held(each) else torch.empty(0) for each in buffers]
        both = zip(self._marks_now(), self._marks, strict=True)
        are_changed = [now is not before or mark != mark_before for (now, mark), (before, mark_before) in both]
        sizes = [each.nbytes for each in own]
        said = torch.tensor([are_changed, sizes, [-size for size in sizes]], dtype=torch.int64)
        any_changed, largest, least = spread(said, torch.maximum, self._hosts).tolist()
        by_device = defaultdict(list)
        for value, changed, most, fewest in zip(own, any_changed, largest, least, strict=True):
            if changed and most == -fewest:  # of other sizes they are a replica's own, as what it has collected
                by_device[value.device].append(value)
        for device, values in by_device.items():
            self._copy(values, self._hosts if device.type == "cpu" else self._group)
        self._marks = self._marks_now()

    def _marks_now(self) -> list[tuple[torch.Tensor | None, object]]:
        """The buffers, which are kept, so that no other gets their memory meanwhile, and how they can be told."""
        values = (registry.get(key) for registry, key in self._places)
        return [(value, None if value is None else change_mark(value)) for value in values]

    def _copy(self, values: list[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        """Copy from the first replica, in one message."""
        values.sort(key=torch.Tensor.element_size, reverse=True)  # so each begins where its type may
        data = torch.cat([as_bytes(value.contiguous()) for value in values])
        dist.broadcast(data, src=global_rank(group, 0), group=group)
        if dist.get_rank(group) == 0:
            return
        for value, part in zip(values, torch.split(data, [value.nbytes for value in values]), strict=True):
            value.copy_(part.view(value.dtype).view(value.shape))


def _is_held(buffer: torch.Tensor | None) -> TypeIs[torch.Tensor]:
    return buffer is not None and not buffer.is_meta and buffer.layout == torch.strided
