"""What Lightning asks a strategy to do with batches: steps, gradients between them, and checks of batch sizes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.build import Pipeline
from lightning_pfo.strategy.parallel.loss_scaling import loss_scale_of
from lightning_pfo.strategy.parallel.reductions import average_gradients
from lightning_pfo.strategy.step.batch_check import check_same_batch
from lightning_pfo.strategy.step.microbatches import default_num_microbatches, training_batch_sizes
from lightning_pfo.strategy.trainer.checkpointing import CheckpointStrategy
from lightning_pfo.strategy.trainer.precision import scaler_of

_CHECKED_BATCHES = 3  # compare the batches of all ranks this often at the start of each epoch ...
_CHECK_EVERY = 50  # ... and then once in so many batches


class StepStrategy(CheckpointStrategy):
    """Base of strategies that run the user's steps on a pipeline, once it is split."""

    _pipeline: Pipeline | None = None
    _num_microbatches: int | None = None
    _accumulating = False

    @abstractmethod
    def _make_schedule(self, num_microbatches: int) -> PipelineSchedule:
        """Make the schedule of training iterations."""

    @property
    def instruction_source(self) -> InstructionSource:
        """Where listeners subscribe to instruction events.

        Raises:
            RuntimeError: Before `setup`.
        """
        return self._get_pipeline().engine

    def _get_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise RuntimeError("Accessing the pipeline before setup() is not possible; use it from on_fit_start on.")
        return self._pipeline

    @property
    @override
    def _last_rank(self) -> int:
        return self._get_pipeline().engine.last_rank

    @override
    def _reseed(self, seed: int) -> None:
        self._seed = self._get_pipeline().engine.seed = seed

    @override
    def on_train_start(self) -> None:
        trainer = self._module().trainer
        sizes = training_batch_sizes(trainer.train_dataloader, trainer.num_training_batches)
        if not sizes:
            return
        if self._num_microbatches is None:
            self._choose_num_microbatches(sizes[0])

    def _choose_num_microbatches(self, batch_size: int) -> None:
        self._num_microbatches = default_num_microbatches(batch_size, self.mesh.num_ranks, self._make_schedule)
        self._get_pipeline().engine.set_num_microbatches(self._num_microbatches)
        rank_zero_info(
            f"pfo_pipeline: batches of {batch_size} are split into "
            f"{counted(self._num_microbatches, 'microbatch', 'microbatches')}."
        )

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        if self._num_microbatches is None:
            self._choose_num_microbatches(self._get_pipeline().runner.batching.size_of(batch))
        assert self._num_microbatches is not None
        self._check_batch(batch)
        with self.precision_plugin.train_step_context():
            return self._get_pipeline().runner.train(
                self._module().training_step,
                self._num_microbatches,
                self._step_seed(0),
                batch,
                rest,
                loss_scale_of(scaler_of(self.precision_plugin), self.root_device),
                keep_gradients=not gradients_are_stale(self._module()),
            )

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("validation", *args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluation_step("test", *args)

    def _evaluation_step(self, kind: str, batch: Any, *rest: Any) -> Any:
        step = getattr(self._module(), f"{kind}_step")
        precision = self.precision_plugin
        with precision.val_step_context() if kind == "validation" else precision.test_step_context():
            num_microbatches = self._evaluation_microbatches()
            return self._get_pipeline().runner.evaluate(kind, step, num_microbatches, self._step_seed(1), batch, rest)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        with self.precision_plugin.predict_step_context():
            return self._get_pipeline().runner.predict(
                self._module().predict_step, self._evaluation_microbatches(), self._step_seed(2), batch, rest
            )

    def _evaluation_microbatches(self) -> int:
        return self._num_microbatches or 4 * self.mesh.num_ranks

    def _step_seed(self, kind: int) -> tuple[int, ...]:
        trainer = self._module().trainer
        batch_idx = trainer.fit_loop.batch_idx if kind == 0 else 0
        return (kind, self.mesh.replica, trainer.current_epoch, trainer.global_step, batch_idx)

    def _check_batch(self, batch: Any) -> None:
        index = self._module().trainer.fit_loop.batch_idx
        if index < _CHECKED_BATCHES or index % _CHECK_EVERY == 0:
            check_same_batch(batch, self.mesh.pipeline_group, self.root_device)
            if self.mesh.tensor_group is not None:
                check_same_batch(batch, self.mesh.tensor_group, self.root_device)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def post_backward(self, closure_loss: torch.Tensor) -> None:
        if not self._accumulating:
            average_gradients(self._get_pipeline().held, self.mesh.replica_group)


def gradients_are_stale(module: pl.LightningModule) -> bool:
    """Return whether Lightning will zero the gradients after this `training_step`, and in its usual way.

    It does so between `training_step` and `backward`. The pipeline computes gradients inside `training_step`, so it
    would hold two of each at that time, unless it is known that nobody looks at the old ones before they are zeroed.

    Args:
        module: The user's module, in training.
    """
    trainer = module.trainer
    if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches:
        return False
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return (
        module.automatic_optimization
        and not is_overridden("optimizer_zero_grad", module)
        and not is_overridden("on_before_zero_grad", module)
        and not any(is_overridden("on_before_zero_grad", callback, pl.Callback) for callback in callbacks)
    )
