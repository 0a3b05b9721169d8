"""The Lightning strategy `pfo_pipeline`: pipeline parallelism for an unchanged LightningModule."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.schedules.registry import check_schedule_name, file_of, load_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.schedules.validation import make_checked_schedule
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.build import Pipeline, build_pipeline
from lightning_pfo.strategy.model.find import PipelinedModule
from lightning_pfo.strategy.model.ownership import move_local_tensors
from lightning_pfo.strategy.model.partition import check_partition
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.loss_scaling import loss_scale_of
from lightning_pfo.strategy.parallel.reductions import average_gradients
from lightning_pfo.strategy.step.batch_check import check_same_batch
from lightning_pfo.strategy.step.layer_times import measure_training_step
from lightning_pfo.strategy.step.microbatches import (
    batch_size_of,
    check_batch_sizes,
    default_num_microbatches,
    evaluation_num_microbatches,
    split_batch,
    training_batch_sizes,
)
from lightning_pfo.strategy.trainer.checkpointing import CheckpointStrategy
from lightning_pfo.strategy.trainer.checks import check_configuration, check_optimizers
from lightning_pfo.strategy.trainer.example_input import give_example_back, set_example_aside
from lightning_pfo.strategy.trainer.finetuning import add_the_same_everywhere, compare_values
from lightning_pfo.strategy.trainer.precision import adapt_to_pipeline, restore, scaler_of
from lightning_pfo.strategy.trainer.signals import obey_signals_together
from lightning_pfo.strategy.trainer.stale_gradients import gradients_are_stale
from lightning_pfo.strategy.trainer.weight_averaging import split_averages

_CHECKED_BATCHES = 3  # compare the batches of all ranks this often at the start of each epoch ...
_CHECK_EVERY = 50  # ... and then once in so many batches


class PfoPipelineStrategy(CheckpointStrategy):
    """Splits a LightningModule into pipeline stages, one or more per device, and trains it with a pipeline schedule.

    The module stays as it is: `training_step`, `self.log`, optimizers and callbacks need no change. Its steps call
    exactly once an `nn.Sequential`, or a module that calls the layers of an `nn.ModuleList` one after the other, as
    Hugging Face models do. Listeners follow every instruction through `instruction_source`.

    Args:
        pipeline_module: Dotted name of the module to split, see `find_pipelined_module`; None finds it when it is
            unambiguous.
        partition: `uniform`, `parameters`, `type:REGEX`, `profile` or `custom:0,8,14,21,27`; see `partition_layers`.
            `profile` runs a few training steps of the whole model on the first rank, on the first training batch.
        num_microbatches: Microbatches per batch; None chooses up to four per rank, see `default_num_microbatches`, or
            what the schedule's file has.
        schedule: `1f1b`, `gpipe`, `interleaved_1f1b`, `looped_bfs`, `interleaved_zero_bubble`, `zbv`, `dualpipev`,
            `envpipe`, or a file with an order of your own; see `lightning_pfo.core.schedules.registry.make_schedule`.
        stages_per_rank: Stages on each device; None is what the schedule is usually run with (2 or 1).
        max_in_flight: Refuse schedules that keep more activations (of a microbatch on a stage) on a device.
        data_parallel_size: Number of replicas of the pipeline; each reads its own batches, gradients are averaged.
        tensor_parallel_size: Number of processes that share each stage's layers; `configure_model` divides them with
            torch's `parallelize_module` over `self.device_mesh["tensor_parallel"]`.
        mesh_order: `dp_pp` (the ranks of a pipeline are neighbours) or `pp_dp` (the replicas of a stage are); the
            processes that share layers are nearer still, unless it says where, as in `dp_tp_pp`.
        fully_shard: Divide parameters, gradients and optimizer states over the replicas (FSDP2), instead of keeping
            them whole on each.
        activation_checkpointing: Keep only the inputs of each layer, and run it again in backward.
        compile: Compile the layers of each stage with torch.compile.
        save_distributed_checkpoint: Whether checkpoints are folders into which every rank writes its shard, rather than
            one file. Either kind loads in any number of stages.
        start_method: How processes are started: `popen` runs the script again for each, `spawn`, `fork` (notebooks) and
            `forkserver` are those of multiprocessing. Without effect under torchrun and SLURM.
        process_group_backend: Backend of torch.distributed; None is gloo on CPU and nccl on CUDA.
        timeout: How long a rank waits for others that live; dead ones are noticed at once.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes checkpoint files.
        precision_plugin: Set by the Trainer.

    Raises:
        ConfigurationError: If there is no such schedule or partition. In `setup`, before any training: no or several
            candidates to split, fewer layers than stages, an impossible partition, manual optimization, a precision
            that replaces layers, compiled layers without a compiler or in a schedule that cuts backwards in two.
        BatchError: Before training, if batches cannot be divided into microbatches.

    Example::

        import lightning as L
        import lightning_pfo

        trainer = L.Trainer(strategy="pfo_pipeline", accelerator="cpu", devices=4)
        trainer.fit(model, train_loader)
    """

    def __init__(
        self,
        pipeline_module: str | None = None,
        partition: str = "uniform",
        num_microbatches: int | None = None,
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        max_in_flight: int | None = None,
        data_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        mesh_order: str = "dp_pp",
        fully_shard: bool = False,
        activation_checkpointing: bool = False,
        compile: bool = False,
        save_distributed_checkpoint: bool = False,
        start_method: str = "popen",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size,
            tensor_parallel_size,
            mesh_order,
            start_method,
            process_group_backend,
            timeout,
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
        )
        check_schedule_name(schedule)
        check_partition(partition)
        if num_microbatches is not None and num_microbatches < 1:
            raise ConfigurationError(f"num_microbatches must be at least 1; got {num_microbatches}.")
        order_file = file_of(schedule)
        if num_microbatches is None and order_file is not None:
            num_microbatches = load_schedule(order_file).num_microbatches
        self._pipeline_module = pipeline_module
        self._partition = partition
        self._num_microbatches = num_microbatches
        self._schedule_name = schedule
        self._stages_per_rank = stages_per_rank
        self._max_in_flight = max_in_flight
        self._fully_shard = fully_shard
        self._activation_checkpointing = activation_checkpointing
        self._compile = compile
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._accumulating = False
        self._layer_sync: Any = None  # where the Trainer leaves what sync_batchnorm=True asks for
        self._pipeline: Pipeline | None = None
        self._example: Any = None

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
    def setup_environment(self) -> None:
        super().setup_environment()
        self._module()._device_mesh = self.mesh.device_mesh
        self._seed = random_state.synchronise()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        check_configuration(
            trainer,
            self.root_device,
            synchronises_batch_norm=self._layer_sync is not None,
            divides_layers=self._fully_shard or self.mesh.tensor_group is not None,
            compiles=self._compile,
            shards_checkpoints=self._save_distributed_checkpoint,
        )
        _silence_sync_dist_advice()
        obey_signals_together(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self._split(self._module())
        split_averages(trainer, self._module())
        self._example = set_example_aside(self._module())
        add_the_same_everywhere(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self.mesh.num_ranks > 1:
                check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
            shared = self._get_pipeline().shared
            adapt_to_pipeline(self.precision_plugin, shared, self.root_device, self.mesh.num_ranks)

    def _split(self, module: pl.LightningModule) -> None:
        self._pipeline = pipeline = build_pipeline(
            module,
            self._make_schedule,
            self.root_device,
            pipeline_module=self._pipeline_module,
            partition=self._partition,
            measure=self._measure_layers if module.trainer.state.fn == TrainerFn.FITTING else None,
            num_microbatches=self._num_microbatches,
            local_device_index=self.local_rank,
            group=self.mesh.pipeline_group,
            replica_group=self.mesh.replica_group,
            tensor_group=self.mesh.tensor_group,
            shard_over=self.mesh.device_mesh["data_parallel"] if self._fully_shard else None,
            activation_checkpointing=self._activation_checkpointing,
            compile=self._compile,
            seed=self._seed,
        )
        if module.trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(f"pfo_pipeline: {pipeline.description}")

    def _measure_layers(self, pipelined: PipelinedModule) -> list[float]:
        module = self._module()
        loader = CombinedLoader(module.trainer.fit_loop._data_source.dataloader(), "max_size_cycle")
        with random_state.isolated(self.root_device):  # a loader draws numbers for its workers and its order
            batch, _, dataloader_idx = next(iter(loader))
        batch = self.batch_to_device(batch, self.root_device, dataloader_idx)
        number = self._num_microbatches
        number = number or default_num_microbatches(batch_size_of(batch), self.mesh.num_ranks, self._make_schedule)
        microbatch = split_batch(batch, number)[0]
        with self.precision_plugin.train_step_context():
            return measure_training_step(
                module, pipelined, lambda: module.training_step(microbatch, 0), self.root_device
            )

    def _make_schedule(self, num_microbatches: int) -> PipelineSchedule:
        return make_checked_schedule(
            self._schedule_name, self.mesh.num_ranks, num_microbatches, self._stages_per_rank, self._max_in_flight
        )

    @override
    def model_to_device(self) -> None:
        move_local_tensors(self._module(), self.root_device)

    @override
    def on_train_start(self) -> None:
        trainer = self._module().trainer
        sizes = training_batch_sizes(trainer.train_dataloader, trainer.num_training_batches)
        if not sizes:
            return
        if self._num_microbatches is None:
            self._choose_num_microbatches(sizes[0])
        assert self._num_microbatches is not None
        check_batch_sizes(sizes, self._num_microbatches)

    def _choose_num_microbatches(self, batch_size: int) -> None:
        self._num_microbatches = default_num_microbatches(batch_size, self.mesh.num_ranks, self._make_schedule)
        self._get_pipeline().engine.set_num_microbatches(self._num_microbatches)
        rank_zero_info(
            f"pfo_pipeline: batches of {batch_size} are split into "
            f"{counted(self._num_microbatches, 'microbatch', 'microbatches')}."
        )

    # ---- steps ----

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        if self._num_microbatches is None:
            self._choose_num_microbatches(batch_size_of(batch))
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
            num_microbatches = self._evaluation_microbatches(batch)
            return self._get_pipeline().runner.evaluate(kind, step, num_microbatches, self._step_seed(1), batch, rest)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = args
        with self.precision_plugin.predict_step_context():
            return self._get_pipeline().runner.predict(
                self._module().predict_step, self._evaluation_microbatches(batch), self._step_seed(2), batch, rest
            )

    def _evaluation_microbatches(self, batch: Any) -> int:
        return evaluation_num_microbatches(batch_size_of(batch), self._num_microbatches or 4 * self.mesh.num_ranks)

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

    @override
    def teardown(self) -> None:
        if self._pipeline is not None:
            self._pipeline.release()
        restore(self.precision_plugin)
        compare_values()
        _optimizers_to_device(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None:
            give_example_back(self.lightning_module, self._example)
            move_local_tensors(self.lightning_module, torch.device("cpu"))
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _silence_sync_dist_advice() -> None:
    # Lightning advises sync_dist=True because several processes log; ours all log the same values
    warnings.filterwarnings("ignore", message=".*It is recommended to use `self.log.*sync_dist=True.*")
