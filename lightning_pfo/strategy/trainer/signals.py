"""What ends a run or saves it between batches, obeyed by all ranks at the same batch.

That is SIGTERM, Ctrl-C, SLURM's request to save and be requeued, and `trainer.should_stop`, which any rank may set; and
with `val_check_interval` as a time, when to validate. Lightning's handlers of signals talk to the other ranks, or save,
from within the signal handler, wherever it interrupts each rank, and Python raises KeyboardInterrupt there; between the
transfers of a pipeline that would be a wait for each other until the timeout. Here a signal is only noted, and when
each batch is done the hosts agree on what was noted, in place of the broadcast Lightning does for SIGTERM. Where others
do not come, a process ends nevertheless: of SIGTERM also one that waits in a collective where no handler can run, and
of a second Ctrl-C wherever it is.
"""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.engine.endings import InterruptedAtOnce
from lightning_pfo.strategy.parallel.groups import OUT_OF_MEMORY, tell_each_other
from lightning_pfo.strategy.step.effects.within import without_replicas
from lightning_pfo.strategy.trainer.compat import (
    Handler,
    after_batches,
    end_after_batch,
    handle_signals,
    try_together,
    validate_together,
)
from lightning_pfo.strategy.trainer.logged.compat import log_what_any_logs
from lightning_pfo.strategy.trainer.processes import WAITS
from lightning_pfo.strategy.watch.stuck import end_if_stuck, heard

_log = logging.getLogger("lightning.pytorch.lightning_pfo")  # which shows what a user is told, as its others do


def _tell(message: str) -> None:
    with suppress(RuntimeError):  # the stream is being written to
        _log.info(message)


class SignalsAtBatchEnd:
    """Notes signals, and obeys them when all ranks have done a batch."""

    def __init__(self) -> None:
        self._terminate = False
        self._interrupted = False
        self._ends_interrupted = False
        self._requeue: tuple[int, FrameType | None] | None = None
        self._save_and_requeue: Handler | None = None
        self._anyone_evaluates = True

    def take_over(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Have signals obeyed at the end of a batch; to be called in the strategy's setup, before training."""
        self._terminate, self._requeue = False, None
        self._interrupted = self._ends_interrupted = False

        ended = threading.Event()

        is_first = trainer.is_global_zero  # in a step another rank may be

        def note_sigterm(signum: int, frame: FrameType | None) -> None:
            if is_first and not self._terminate:
                _tell("Received SIGTERM: the run ends when this batch is done.")
            self._terminate = True

        def heed_sigterm() -> None:
            if trainer.strategy.launcher is not None:
                trainer.strategy.launcher.kill(signal.SIGTERM)
            end_if_stuck(WAITS, ended)

        patches.enter_context(heard(signal.SIGTERM, heed_sigterm))
        patches.callback(ended.set)

        def note_requeue(signum: int, frame: FrameType | None) -> None:
            self._requeue = (signum, frame)

        self._save_and_requeue = handle_signals(trainer, note_sigterm, note_requeue, patches)
        self._anyone_evaluates = True
        after_batches(
            trainer,
            partial(self._agree, trainer),
            self._batch_is_over,
            partial(self._first_comes, trainer),
            partial(self._evaluated, trainer),
            partial(self._wait_for_replicas, trainer),
            patches,
        )
        validate_together(trainer, partial(self._is_any, trainer), patches)
        strategy: Any = trainer.strategy
        try_together(partial(strategy.meet, OUT_OF_MEMORY), patches)

    def _is_any(self, trainer: pl.Trainer, is_here: bool) -> bool:
        strategy: Any = trainer.strategy
        return bool(strategy.meet("whether it is time to validate", (is_here,))[0])

    def hear_interrupts(self, trainer: pl.Trainer, patches: Patches) -> None:
        """Have Ctrl-C obeyed at the end of a batch too, so that all ranks can save; a second one where it comes.

        To be called just before the run's loops: after it, Lightning puts back the handlers that it found before.
        """
        if threading.current_thread() is not threading.main_thread() or trainer.world_size == 1:
            return
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.default_int_handler:  # the user's own, or it is ignored
            return

        is_first = trainer.is_global_zero

        def note_interrupt(signum: int, frame: FrameType | None) -> None:
            if self._interrupted:
                raise InterruptedAtOnce
            self._interrupted = True
            if is_first:
                _tell("\nInterrupted: the run ends when this batch is done. Ctrl-C again ends it at once.")

        def put_back() -> None:
            if signal.getsignal(signal.SIGINT) is note_interrupt:
                signal.signal(signal.SIGINT, before)

        signal.signal(signal.SIGINT, note_interrupt)
        patches.callback(put_back)

    def _agree(self, trainer: pl.Trainer, what: str) -> None:
        """Obey what any rank has noted; a collective call.

        Args:
            trainer: The Trainer.
            what: What has been done, the same on all ranks.
        """
        strategy: Any = trainer.strategy
        votes = (self._terminate, self._interrupted, self._requeue is not None, trainer.should_stop)
        terminate, interrupted, requeue, stop = strategy.meet(f"after {what}", votes)
        if stop:
            trainer.should_stop = True
        if requeue and trainer.training and self._save_and_requeue is not None:
            self._save_and_requeue(*(self._requeue or (0, None)))
            self._requeue = None
        if terminate:
            end_after_batch(trainer)  # on every rank
        self._ends_interrupted = interrupted

    def _batch_is_over(self) -> None:
        """Lightning has counted the batch by now, so that a checkpoint resumes behind it."""
        if self._ends_interrupted:
            raise KeyboardInterrupt

    def _first_comes(self, trainer: pl.Trainer, has_all: bool) -> None:
        """Where replicas compute each layer together, one without a batch would be waited for within the first."""
        strategy: Any = trainer.strategy
        if strategy.divides_layers:
            self._evaluated(trainer, True, has_all)

    def _evaluated(self, trainer: pl.Trainer, has_more: bool, has_all: bool) -> None:
        """Obey SIGTERM and Ctrl-C between batches of an evaluation, of which replicas may have different numbers.

        A collective call of all replicas. One that is done with its batches takes part in it for as long as another
        one has more, so that nobody waits for it, and so that all end together.

        Args:
            trainer: The Trainer.
            has_more: Whether this replica has more batches.
            has_all: Whether it has batches of each loader.

        Raises:
            SIGTERMException: On every rank, if there is more to evaluate.
            KeyboardInterrupt: On every rank.
            ConfigurationError: On every rank, if replicas that compute each layer together have other numbers, or if
                one has no batch of a loader where others log what all of them reduce.
        """
        strategy: Any = trainer.strategy
        votes = (self._terminate, self._interrupted, has_more, not has_more, has_all, not has_all)
        answers = strategy.meet("after a batch of an evaluation", votes)
        terminate, interrupted, self._anyone_evaluates, anyone_is_done, anyone_has_all, anyone_lacks = answers
        if self._anyone_evaluates and anyone_is_done and strategy.divides_layers:
            raise ConfigurationError(
                "With fully_shard replicas compute each layer together, so all evaluate the same number of batches; "
                "here one has no more, and another has. Give them as many samples each (Lightning's sampler does, in "
                "validate and test), or leave fully_shard out."
            )
        if anyone_has_all and anyone_lacks and not trainer.predicting:
            raise ConfigurationError(
                "Replicas reduce together what is logged in an evaluation, so each has a batch of every loader; here "
                "one has none, and another has. Give each at least one (Lightning's sampler does), or use fewer "
                "replicas: data_parallel_size."
            )
        if terminate:
            end_after_batch(trainer)
            if self._anyone_evaluates:
                raise SIGTERMException
        if interrupted:
            raise KeyboardInterrupt

    def _wait_for_replicas(self, trainer: pl.Trainer, has_all: bool) -> None:
        while self._anyone_evaluates:
            self._evaluated(trainer, False, has_all)
        self._anyone_evaluates = True  # when the next evaluation begins
        strategy: Any = trainer.strategy
        if strategy.mesh.replica_group is not None and not trainer.predicting:
            hosts = strategy.mesh.groups.hosts(strategy.mesh.replica_group)
            log_what_any_logs(trainer, partial(tell_each_other, hosts=hosts), without_replicas)
