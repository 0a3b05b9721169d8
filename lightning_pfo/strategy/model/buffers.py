"""Buffers that a user's step changes by itself, outside of the modules that stages run.

Every stage runs the step, but the values from which a buffer is made are there on one stage only. So each stage changes a
copy of its own, and after the iteration all ranks get that of the stage which has the values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.model.tracing.tracked import Tracked, no_longer_tracked
from lightning_pfo.strategy.parallel.compat import named_tensors, tensors_of
from lightning_pfo.strategy.parallel.groups import Shared, global_rank

Changes = Mapping[str, int | None]
"""The stage whose values change a tensor, by its name; None where all stages change it alike."""


class StepBuffers:
    """The buffers of an iteration on one rank.

    Args:
        owner: The user's module.
        changes: What its step changes.
        num_stages: Number of stages of this rank; with several of them each needs a copy.
    """

    def __init__(self, owner: nn.Module, changes: Changes, num_stages: int) -> None:
        self._owner = owner
        self._changes = changes
        self._copies: dict[int, dict[str, torch.Tensor]] = {}
        self._before = {name: tensor.detach().clone() for name, tensor in self._changed()} if num_stages > 1 else None

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Let a stage change its own while the context is open."""
        objects = dict(self._changed())
        if self._before is not None:
            _write(objects, self._copies.get(stage, self._before))
        try:
            yield
        finally:
            for name, before in objects.items():
                self._settle(name, before)
            if self._before is not None:
                self._copies[stage] = {name: tensor.detach().clone() for name, tensor in self._changed()}

    def agree(self, placement: Sequence[int], shared: Sequence[Shared], group: dist.ProcessGroup | None) -> None:
        """Give all who hold a buffer the value of the stage that has changed it; a collective call of the pipeline."""
        tensors, own = dict(self._changed()), dist.get_rank(group)
        for name, stage in self._changes.items():
            if name in tensors and stage is not None and stage in self._copies:
                _write({name: tensors[name]}, self._copies[stage])
        for each in shared:
            for name in each.names:
                stage = self._changes.get(name)
                if stage is not None and placement[stage] in each.ranks:
                    source = global_rank(group, placement[stage])
                    value = tensors[name].detach()
                    value = value if value.is_contiguous() else value.contiguous()
                    dist.broadcast(value, src=source, group=each.group)
                    if placement[stage] != own:
                        _write(tensors, {name: value})

    def _changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._changes:
            tensors = named_tensors(self._owner)
            yield from ((name, tensors[name]) for name in self._changes if name in tensors)

    def _settle(self, name: str, before: torch.Tensor) -> None:
        """Keep what was assigned to a buffer, unless this stage has no value for it."""
        path, _, key = name.rpartition(".")
        buffers = tensors_of(self._owner.get_submodule(path)).buffers
        now = buffers.get(key)
        if isinstance(now, Tracked):
            buffers[key] = before if now.is_absent else no_longer_tracked(now).detach()


def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in values and values[name] is not tensor and not tensor.is_meta:
                tensor.copy_(values[name])
