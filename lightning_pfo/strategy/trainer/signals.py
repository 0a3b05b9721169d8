"""SIGTERM, and SLURM's request to save and be requeued, obeyed by all ranks at the same batch.

Lightning's handlers talk to the other ranks, or save, from within the signal handler, wherever it interrupts each rank;
between the transfers of a pipeline that would be a wait for each other until the timeout. Here a signal is only noted,
and at the end of each batch the ranks agree on what was noted, in place of the broadcast Lightning does for SIGTERM. In
training the hosts vote while the optimizer works, so that neither they nor their devices wait for it.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_pfo.strategy.parallel.groups import host_group
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.trainer.compat import Handler, end_after_batch, handle_signals


class SignalsAtBatchEnd(pl.Callback):
    """Notes signals, and obeys them when all ranks have done a batch."""

    def __init__(self) -> None:
        self._terminate = False
        self._requeue: tuple[int, FrameType | None] | None = None
        self._save_and_requeue: Handler | None = None
        self._hosts: dist.ProcessGroup | None = None
        self._vote: tuple[torch.Tensor, dist.Work | None] | None = None

    def take_over(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Have signals obeyed at the end of a batch; to be called in the strategy's setup, before training."""
        self._terminate, self._requeue, self._vote = False, None, None
        if self._hosts is None and trainer.world_size > 1:
            self._hosts = host_group(None, trainer.strategy.root_device)

        def note_sigterm(signum: int, frame: FrameType | None) -> None:
            if not self._terminate and trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signum)
            self._terminate = True

        def note_requeue(signum: int, frame: FrameType | None) -> None:
            self._requeue = (signum, frame)

        self._save_and_requeue = handle_signals(trainer, note_sigterm, note_requeue, patches)
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(self)
        patches.callback(callbacks.remove, self)

    def _begin_vote(self, trainer: pl.Trainer) -> None:
        votes = torch.tensor([int(self._terminate), int(self._requeue is not None)])
        work = None
        if trainer.world_size > 1:
            work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._hosts, async_op=True)
        self._vote = (votes, work)

    def _agree(self, trainer: pl.Trainer, *, may_save: bool) -> None:
        if self._vote is None:
            self._begin_vote(trainer)
        assert self._vote is not None
        votes, work = self._vote
        self._vote = None
        if work is not None:
            work.wait()
        noted = votes.tolist()
        if noted[1] and may_save and self._save_and_requeue is not None:
            self._save_and_requeue(*(self._requeue or (0, None)))
            self._requeue = None
        if noted[0]:
            end_after_batch(trainer)  # on every rank

    @override
    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._vote is None:  # an optimizer may run its closure several times
            self._begin_vote(trainer)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._agree(trainer, may_save=True)

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._agree(trainer, may_save=False)

    @override
    def on_test_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._agree(trainer, may_save=False)

    @override
    def on_predict_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        self._agree(trainer, may_save=False)
