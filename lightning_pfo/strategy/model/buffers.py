"""Buffers and parameters that a user's step changes by itself, outside of the modules that stages run.

Every stage runs the step, but the values from which a buffer is made are there on one stage only. So each stage changes
a copy of its own, and after the iteration all ranks get that of the stage which has the values.

A buffer goes on from microbatch to microbatch. A parameter, such as one of a teacher that follows its student, changes
once for a batch: each run of the step finds it as it was before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import named_tensors, tensors_of
from lightning_pfo.strategy.compat.tensors import version_restorer
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following, no_longer_tracked
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.parallel.groups import Shared, as_bytes, global_rank

Changes = Mapping[str, int | None]
"""The stage whose values change a tensor, by its name; None where all stages change it alike."""


class StepBuffers:
    """The buffers of an iteration on one rank, and its parameters that change.

    Args:
        owner: The user's module.
        changes: What its step changes.
        num_stages: Number of stages of this rank; with several of them each needs a copy.
        users: The stages that use a tensor, by its name; those that are not named may use it.
        looks: Whether it is noted which buffers change again with later microbatches.

    Attributes:
        gone_on: Buffers of which a later microbatch has made something else than an earlier one.
        differing: Parameters into which one has written something else.
    """

    def __init__(
        self,
        owner: nn.Module,
        changes: Changes,
        num_stages: int,
        users: Mapping[str, frozenset[int]],
        *,
        looks: bool = False,
    ) -> None:
        self._owner = owner
        self._changes = changes
        self._several = num_stages > 1
        self._users = users
        self._of_stage: dict[int, dict[str, torch.Tensor]] = {}
        changed = dict(self._changed())
        self._parameters = {
            name: (tensor, tensor.detach().clone(), version_restorer(tensor))
            for name, tensor in changed.items()
            if isinstance(tensor, nn.Parameter) and not is_placeholder(tensor)
        }
        buffers = {name: tensor.detach() for name, tensor in changed.items() if not isinstance(tensor, nn.Parameter)}
        self._before = buffers if self._several else {}
        self._left: dict[int, dict[str, torch.Tensor]] = {}
        self._looks = looks
        self.gone_on: set[str] = set()
        self.differing: set[str] = set()
        self._written: dict[tuple[int, bool, str], torch.Tensor] = {}

    @contextmanager
    def of(self, stage: int, *, ends_here: bool = False) -> Iterator[None]:
        """Let a stage change its own while the context is open.

        Args:
            stage: The stage.
            ends_here: Whether the step runs to its end there; of one whose end runs on the whole batch that one does.
        """
        with following(None):
            self.put_back(stage)
            if self._several:  # other objects, as autograd may have saved those of another microbatch
                for name, value in self._before.items():
                    own = self._of_stage.get(stage, {})
                    self._set(name, own[name] if name in own else value.clone())
            objects = dict(self._changed())
            looked_at = self._looked_at(stage)
        try:
            yield
        finally:
            with following(None):
                self._note(stage, objects, looked_at, ends_here)

    def _note(
        self, stage: int, objects: dict[str, torch.Tensor], looked_at: dict[str, torch.Tensor], ends_here: bool
    ) -> None:
        """Note what a run of a stage has changed, given its tensors before."""
        for name, before in objects.items():
            now = self._get(name)
            if isinstance(now, Tracked) and now is not before:  # assigned, if the stage has a value for it
                self._set(name, before if now.is_absent else no_longer_tracked(now).detach())
        self._of_stage[stage] = dict(self._changed())
        now_there = self._looked_at(stage)
        self.gone_on |= {name for name, before in looked_at.items() if not _is_same(before, now_there[name])}
        self._compare(stage, ends_here)
        if self._several:  # stages that end the step before it changes a parameter may run later
            self._left[stage] = {name: tensor.detach().clone() for name, (tensor, *_) in self._parameters.items()}

    def _looked_at(self, stage: int) -> dict[str, torch.Tensor]:
        """Copies of the buffers that a stage has changed in an earlier microbatch, where it has the values for them."""
        if not self._looks or stage not in self._of_stage:
            return {}
        return {
            name: tensor.detach().clone()
            for name, tensor in self._changed()
            if self._changes[name] in (None, stage) and not isinstance(tensor, nn.Parameter)
        }

    def _goes_on(self, name: str, stage: int) -> bool:
        """Whether a stage finds a parameter as another one has changed it, or does not use it at all."""
        changing = self._changes[name]
        return changing not in (None, stage) and (stage > changing or stage not in self._users.get(name, {stage}))

    def put_back(self, stage: int | None = None) -> None:
        """Give parameters the values that they had before; for a run of a stage, those that it finds so.

        Backward takes them as the step leaves them, as on one device; if it has used them before it wrote into them,
        torch says so, by their version.
        """
        for name, (tensor, before, restore_version) in self._parameters.items():
            if stage is not None and self._goes_on(name, stage):
                continue
            tensor.data.copy_(before)
            if name not in self.differing:  # else a backward would take the values of another microbatch
                restore_version()

    def _compare(self, stage: int, ends_here: bool) -> None:
        """Find parameters into which a microbatch has written something else than the one before.

        Raises:
            ConfigurationError: If it is one that is trained.
        """
        for name, (tensor, *_) in self._parameters.items() if self._looks else ():
            if self._changes[name] not in (None, stage) or name in self.differing:
                continue
            with torch.no_grad():
                now = _print_of(tensor)
                before = self._written.setdefault((stage, ends_here, name), now)
                if not _is_same(before, now):
                    if tensor.requires_grad:
                        raise ConfigurationError(writes_otherwise(name))
                    self.differing.add(name)
                    tensor.add_(0)  # another version than the first microbatch has saved

    def leave(self, modules: Collection[str]) -> None:
        """Leave the buffers of some modules as they are now, which is as on one device."""
        names = {name for name in self._changes if name.rpartition(".")[0] in modules}
        self.gone_on -= names
        self._before = {name: value for name, value in self._before.items() if name not in names}

    def agree(self, placement: Sequence[int], shared: Sequence[Shared], group: dist.ProcessGroup | None) -> None:
        """Give all who hold one the value of the stage that has changed it; a collective call of the pipeline."""
        tensors = dict(self._changed())
        # what all stages change alike those do not that end the step before
        last = len(placement) - 1
        changes = {name: last if stage is None else stage for name, stage in self._changes.items()}
        for name, stage in changes.items():
            if stage in self._left and name in self._left[stage]:
                tensors[name].data.copy_(self._left[stage][name])
            elif stage in self._of_stage and name in self._before:
                self._set(name, self._of_stage[stage][name])
        tensors = dict(self._changed())
        for each in shared:
            for name in each.names:
                source = placement[changes[name]] if name in changes else None
                if source in each.ranks:
                    value = tensors[name].detach().contiguous()
                    dist.broadcast(as_bytes(value), src=global_rank(group, source), group=each.group)
                    with torch.no_grad():
                        tensors[name].copy_(value)

    def _changed(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._changes:
            tensors = named_tensors(self._owner)
            yield from ((name, tensors[name]) for name in self._changes if name in tensors)

    def _get(self, name: str) -> torch.Tensor | None:
        path, _, key = name.rpartition(".")
        return tensors_of(self._owner.get_submodule(path)).buffers.get(key)

    def _set(self, name: str, value: torch.Tensor) -> None:
        path, _, key = name.rpartition(".")
        tensors_of(self._owner.get_submodule(path)).buffers[key] = value


def writes_otherwise(name: str) -> str:
    """What is said of a parameter into which the step has written something else for each microbatch."""
    return (
        f"The step writes into the parameter self.{name} something else for each microbatch, of which the last one "
        f"stays; on one device it writes once for the batch. Keep in the step what it is made from (self.rows = "
        f"rows.detach(), which is that of the whole batch on every rank), and write after the step (in "
        f"on_train_batch_end)."
    )


def _print_of(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers that are other ones for other values, most likely; a copy would take the memory of the tensor.

    Of a tensor that is divided over processes they are those of this one's part: nobody waits for others here.
    """
    numbers = local(tensor.detach())
    norm = torch.linalg.vector_norm(numbers, dtype=torch.promote_types(numbers.dtype, torch.float64))
    return torch.stack([norm, numbers.sum(dtype=norm.dtype)])


def _is_same(before: torch.Tensor, now: torch.Tensor) -> bool:
    return before.shape == now.shape and torch.equal(before, now)
