"""What a step returns and leaves behind of its microbatches, in a trial, and what it takes to put that together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import tree_leaves
from lightning_pfo.strategy.engine.living_bytes import LivingBytes, bytes_on
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.merge import Changes
from lightning_pfo.strategy.step.effects.parcel import pack
from lightning_pfo.strategy.step.gradients import kept_of, loss_of
from lightning_pfo.strategy.step.memory.costs import NO_COST, Cost
from lightning_pfo.strategy.step.recording import LogRecorder


@dataclass(frozen=True)
class Left:
    """What is there when a step has ended.

    Attributes:
        merging: What putting it together takes, and leaves beside what microbatches have left.
        output_bytes: Of what the step returned for the batch.
        attribute_bytes: What attributes have from then on.
        sent_bytes: Of what other ranks receive.
        sent_attribute_bytes: Of attributes among that.
    """

    merging: Cost = NO_COST
    output_bytes: int = 0
    attribute_bytes: int = 0
    sent_bytes: int = 0
    sent_attribute_bytes: int = 0

    def as_sent(self) -> Left:
        """The same on a rank that receives it."""
        merging = Cost(self.sent_bytes, self.sent_bytes)
        return replace(self, merging=merging, attribute_bytes=self.sent_attribute_bytes)


class Leavings:
    """Keeps what a step returns and leaves behind as `StepRunner` does.

    Args:
        owner: The user's module.
        sizes: How many samples each microbatch has; of the whole batch, if the step ends on that.
        wanted: Whether somebody wants what the step returns beside the loss.
        batch_dim: The dimension along which tensors have samples.
        is_sent: Whether there are other ranks.
    """

    def __init__(self, owner: nn.Module, sizes: Sequence[int], batch_dim: int, *, wanted: bool, is_sent: bool) -> None:
        self._owner = owner
        self._sizes = tuple(sizes)
        self._batch_dim = batch_dim
        self._wanted = wanted
        self._is_sent = is_sent
        self._effects = Effects(owner)
        self._results: list[Any] = []

    def leave_alone(self, buffers: Iterable[str]) -> None:
        """Take buffers for none of these: stages change them on the way."""
        self._effects.leave_alone(buffers)

    def of(self, *, ends_here: bool) -> AbstractContextManager[None]:
        """Where the user's step runs."""
        return self._effects.of(ends_here=ends_here, log=_say_nothing)

    def take(self, result: Any, _: int) -> torch.Tensor:
        """Keep what is kept of a result; returns the loss."""
        loss = loss_of(result)
        self._results.append(kept_of(result, loss, wanted=self._wanted))
        return loss

    def put_together(self, living: LivingBytes, device: torch.device) -> Left:
        """Put together what all microbatches leave, if they are all like the latest.

        Args:
            living: Counts memory.
            device: Where it is counted.
        """
        number = len(self._sizes)
        self._results = self._results[-1:] * number
        self._effects.repeat(number)
        shares = tuple(size / sum(self._sizes) for size in self._sizes)
        living.peak = start = living.now
        with living:
            outcome = self._effects.outcome(self._sizes, shares, is_sent=self._is_sent)
            recorder = LogRecorder(self._owner, shares, self._sizes)
            outcome |= recorder.output(self._results, train=True, batch_dim=self._batch_dim)
        sent = pack(outcome, device).tensors if self._is_sent else ()
        return Left(
            Cost(living.peak - start, living.now - start),
            _bytes_of(outcome["output"], device),
            _bytes_of(_new({**outcome["changes"], **self._effects.dear}), device),
            sum(bytes_on(device, tensor.nbytes) for tensor in sent),
            _bytes_of(_new(outcome["changes"]), device),
        )


def _new(changes: Changes) -> Changes:
    """Those of attributes; buffers are counted anyway."""
    return {path: change for path, change in changes.items() if path[0] != "_buffers"}


def _bytes_of(values: Any, device: torch.device) -> int:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    return sum(bytes_on(device, tensor.nbytes) for tensor in tensors)


def _say_nothing(*args: Any, **kwargs: Any) -> None:
    pass
