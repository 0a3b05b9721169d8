"""The Lightning strategy `pfo_pipeline`: pipeline parallelism for an unchanged LightningModule."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import MixedPrecisionPolicy
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import check_counts, check_switches
from lightning_pfo.core.schedules.registry import check_schedule_name, file_of, load_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.schedules.validation import make_checked_schedule
from lightning_pfo.strategy.build import Pipeline, build_pipeline
from lightning_pfo.strategy.compat.patches import Patches, unwarned
from lightning_pfo.strategy.model.batch_norm import check_batch_norm
from lightning_pfo.strategy.model.ownership import check_uncalled, move_local_tensors
from lightning_pfo.strategy.model.partition import check_partition
from lightning_pfo.strategy.model.tracing.placeholders import explain_missing_values
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.clipping import Norms
from lightning_pfo.strategy.parallel.fsdp import Sharding, check_shard_offload
from lightning_pfo.strategy.parallel.mesh import check_shard_size, sharding_mesh
from lightning_pfo.strategy.state.placeholders import refuse_saving
from lightning_pfo.strategy.state.sharded import is_sharded
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.loading import check_loaded_by
from lightning_pfo.strategy.step.batches.splitting import SplitBatch
from lightning_pfo.strategy.step.batches.weights import MicrobatchWeight
from lightning_pfo.strategy.step.effects.outward.calls import log_in_step
from lightning_pfo.strategy.step.memory.watch import MemoryWatch, is_worth_a_report
from lightning_pfo.strategy.trainer.callbacks.finetuning import add_the_same_everywhere
from lightning_pfo.strategy.trainer.callbacks.progress_bars import compute_for_bars
from lightning_pfo.strategy.trainer.callbacks.throughput import count_pipelines
from lightning_pfo.strategy.trainer.callbacks.weight_averaging import split_averages
from lightning_pfo.strategy.trainer.checks import (
    check_configuration,
    check_optimizers,
    refuse_missing_values,
    set_example_aside,
    tell_of_counts,
    tell_of_state,
)
from lightning_pfo.strategy.trainer.compat import (
    Restoring,
    allow_skipping,
    move_optimizers,
    set_device_mesh,
)
from lightning_pfo.strategy.trainer.logged.compat import keep_results_where_they_are, logs_by
from lightning_pfo.strategy.trainer.manual.optimization import ManualOptimization
from lightning_pfo.strategy.trainer.precision import adapt_to_pipeline, check_unscaled
from lightning_pfo.strategy.trainer.signals import SignalsAtBatchEnd
from lightning_pfo.strategy.trainer.steps import StepStrategy

_RECOMPUTED: dict[bool | str, str | None] = {False: None, True: "full", "full": "full", "selective": "selective"}
_ZERO_STAGES: dict[bool | str, int] = {False: 0, True: 1, "zero1": 1, "zero2": 2, "zero3": 3}
# several processes log, but all the same values
_SYNC_DIST_ADVICE = ".*It is recommended to use `self.log.*sync_dist=True.*"
# averages of weights that are loaded, of which a rank holds those of its own stages
_NO_COPY = "for .*: copying from a non-meta parameter in the checkpoint to a meta parameter"


class PfoPipelineStrategy(StepStrategy):
    """Splits a LightningModule into pipeline stages, one or more per device, and trains it with a pipeline schedule.

    The module stays as it is: `training_step`, `self.log`, optimizers and callbacks need no change. Its step is traced
    on a first batch, and the layers that it calls are divided into stages. Listeners follow every instruction through
    `instruction_source`.

    Args:
        pipeline_module: Dotted name of the module whose layers are divided; None finds them, see `find_units`.
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
        fully_shard: Divide layers over the replicas (FSDP2) instead of keeping them whole on each. While an iteration
            runs, `zero1` (or True) divides the states of optimizers, `zero2` the sums of gradients too, and `zero3`
            weights too; between iterations all is divided.
        shard_size: How many replicas divide layers among them with `fully_shard`; None is all, else each group of so
            many has all layers (HSDP).
        shard_precision: torch's `MixedPrecisionPolicy` for divided layers.
        shard_offload: Keep divided weights, gradients and states of optimizers in the host's memory, where the
            optimizer computes; weights come to the device when they are gathered (torch's `CPUOffloadPolicy`).
        activation_checkpointing: `full` (or True) keeps only the inputs of each layer and runs it again in backward,
            `selective` keeps the results of products of matrices, convolutions and attention too, which take most of
            that time.
        offload_activations: Let what forwards save for backwards wait in the host's memory, but for microbatches whose
            backward follows at once. On CUDA it is copied while other things are computed.
        compile: Compile the layers of each stage with torch.compile.
        batch_dim: The dimension along which the tensors of a batch have samples.
        split_batch: A function `(batch, num_microbatches) -> microbatches` for batches that are not split along a
            dimension; it may return fewer for a smaller batch.
        microbatch_weight: How much each microbatch counts in the loss of its batch: `samples` (the loss is a mean over
            samples), `tokens` (over labels that are not -100), `sum` (the loss is a sum), a function of a microbatch
            that counts what the loss is a mean over, or `auto`: by samples, until the first batches show that the loss
            of one device is a mean over labels that are not -100.
        load_batches: Which ranks of a pipeline run loaders: `all`, or `first`, which gives batches to the others.
        loss_over: `microbatch` (the loss of a batch is the weighted mean of its microbatches' losses) or `batch` (the
            end of the step runs once on all of the batch, for losses that compare samples; with schedules that do all
            forwards first, such as `gpipe`).
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses, which is
            what the pipeline trains on. It is an error if no weighting of microbatches explains the difference, else a
            warning.
        batch_norm: When batch norms update their running statistics: `microbatch` (with each, as when gradients are
            accumulated) or `deferred` (once per batch, by the statistics of all its samples, as one device does).
        precise_gradients: Whether the gradients of a batch's microbatches, and of replicas, are added up in 32 bits
            where parameters have 16 (`precision="bf16-true"`); takes 4 bytes for each parameter.
        hold_uncalled: Which ranks hold what the first batch is not known to use: `everywhere`, so that later batches,
            hooks and single ranks can, or `once`, where only what runs on the last stage can.
        memory_report: Whether it is said before the first training step how much memory each rank will take, and of
            what; `memory_report` of the strategy has it as data. None: if there are 16 MiB of parameters or more.
        gather: Which ranks of a pipeline get what `predict_step` returns: `all`, `rank0`, or `none`, where the last
            stage's rank alone has it. Prediction writers write on one of them.
        save_distributed_checkpoint: Whether checkpoints are folders into which every rank writes its shard, rather than
            one file; either kind loads in any number of stages. `async` copies tensors and writes while training goes
            on; a checkpoint is in its place when the next one is begun, and at the end of `fit`.
        start_method: How processes are started: `popen` runs the script again for each, `clone` lets forks of this
            process go on with it (see `CloneLauncher`), `spawn`, `fork` (notebooks) and `forkserver` are those of
            multiprocessing. Without effect under torchrun and SLURM.
        process_group_backend: Backend of torch.distributed; None is gloo on CPU and nccl on CUDA.
        timeout: How long a rank waits for others that live; dead ones are noticed at once.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Reads and writes checkpoint files.
        precision_plugin: Set by the Trainer.

    Raises:
        ConfigurationError: If there is no such schedule or partition. In `setup`, before any training: no or several
            candidates to split, fewer layers than stages, an impossible partition, a precision
            that replaces layers, compiled layers without a compiler or in a schedule that cuts backwards in two.
            On the first batch: a loss that is NaN, or does not suit microbatches.
        BatchError: On a batch that cannot be divided into microbatches.

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
        fully_shard: bool | str = False,
        shard_size: int | None = None,
        shard_precision: MixedPrecisionPolicy | None = None,
        shard_offload: bool = False,
        activation_checkpointing: bool | str = False,
        offload_activations: bool = False,
        compile: bool = False,
        save_distributed_checkpoint: bool | str = False,
        batch_dim: int = 0,
        split_batch: SplitBatch | None = None,
        microbatch_weight: MicrobatchWeight = "auto",
        load_batches: str = "all",
        loss_over: str = "microbatch",
        check_loss: bool = True,
        batch_norm: str = "microbatch",
        precise_gradients: bool = False,
        hold_uncalled: str = "everywhere",
        memory_report: bool | None = None,
        gather: str = "all",
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
        check_batch_norm(batch_norm)
        check_loaded_by(load_batches)
        self._load_batches = load_batches
        check_counts(num_microbatches=num_microbatches, stages_per_rank=stages_per_rank, max_in_flight=max_in_flight)
        check_switches(
            shard_offload=shard_offload,
            offload_activations=offload_activations,
            compile=compile,
            check_loss=check_loss,
            precise_gradients=precise_gradients,
        )
        order_file = file_of(schedule)
        if num_microbatches is None and order_file is not None:
            num_microbatches = load_schedule(order_file).num_microbatches
        self._pipeline_module = pipeline_module
        self._partition = partition
        self._num_microbatches = num_microbatches
        self._is_number_given = num_microbatches is not None
        self._schedule_name = schedule
        self._stages_per_rank = stages_per_rank
        self._max_in_flight = max_in_flight
        if fully_shard not in _ZERO_STAGES:
            raise ConfigurationError(f"fully_shard is one of {list(_ZERO_STAGES)}; got {fully_shard!r}.")
        self._zero_stage = _ZERO_STAGES[fully_shard]
        check_shard_size(shard_size, bool(fully_shard), data_parallel_size, tensor_parallel_size)
        self._shard_size = shard_size
        self._shard_precision = shard_precision
        check_shard_offload(shard_offload, bool(fully_shard))
        self._offloads_shards = shard_offload
        if activation_checkpointing not in _RECOMPUTED:
            raise ConfigurationError(
                f"activation_checkpointing is one of {list(_RECOMPUTED)}; got {activation_checkpointing!r}."
            )
        self._activation_checkpointing = _RECOMPUTED[activation_checkpointing]
        self._offload_activations = offload_activations
        self._compile = compile
        if save_distributed_checkpoint not in (False, True, "async"):
            raise ConfigurationError(
                f"save_distributed_checkpoint is False, True or 'async'; got {save_distributed_checkpoint!r}."
            )
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._batching = Batching(
            batch_dim,
            split_batch,
            microbatch_weight,
            loss_over,
            has_several_loaders=self._trains_side_by_side,
            expected=self._expected_sizes,
            label_leaves=partial(getattr, self, "_label_leaves"),
        )
        self._check_loss = check_loss
        self._batch_norm = batch_norm
        self._precise_gradients = precise_gradients
        check_uncalled(hold_uncalled)
        self._hold_uncalled = hold_uncalled
        if gather not in ("all", "rank0", "none"):
            raise ConfigurationError(f"gather is 'all', 'rank0' or 'none'; got {gather!r}.")
        self._gather = gather
        self._reports_memory = memory_report
        self._signals = SignalsAtBatchEnd()
        self._patches = Patches()

    def __getstate__(self) -> dict[str, Any]:
        """For copies of a Trainer, and other processes: without what belongs to the processes of a run."""
        state = {
            **super().__getstate__(),
            "_pipeline": None,
            "_norms": None,
            "_mesh": None,
            "_meeting": None,
            "rank_watch": None,
            "manual": None,
        }
        state.pop("_restore", None)
        return {**state, "_signals": SignalsAtBatchEnd(), "_patches": Patches()}

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._restore = Restoring(self._module().trainer)
        # a forked process makes torch's threads anew where it first asks for them; those of autograd, which begin
        # together, would be several that ask at once, and torch aborts (seen in 2.15 with CUDA's libraries)
        torch.set_num_threads(torch.get_num_threads())
        self._patches.close()
        if self.world_size > self.mesh.num_replicas and self._module().trainer.state.fn == TrainerFn.FITTING:
            tell_of_state(self._patches)
            if self.global_rank == 0:
                tell_of_counts(self._module(), self.mesh.num_replicas, self._patches)
        set_device_mesh(self._module(), self.mesh.device_mesh)
        self._seed = random_state.synchronise()
        explain_missing_values(self.root_device)  # setup hooks find a module as an earlier run has divided it

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        check_configuration(
            trainer,
            self.root_device,
            synchronises_batch_norm=self.synchronises_batch_norm,
            is_divided=self.mesh.num_ranks > 1 or self._zero_stage > 0 or self.mesh.tensor_group is not None,
            divides_layers=self._zero_stage > 0 or self.mesh.tensor_group is not None,
            compiles=self._compile,
            shards_checkpoints=bool(self._save_distributed_checkpoint),
        )
        for needless in (_SYNC_DIST_ADVICE, _NO_COPY):
            self._patches.enter_context(unwarned(needless))
        self._signals.take_over(trainer, self._patches)
        self.model = self.precision_plugin.convert_module(self.model)
        is_manual = trainer.state.fn == TrainerFn.FITTING and not self._module().automatic_optimization
        self.manual = ManualOptimization(trainer, self._patches) if is_manual else None
        pipeline = self._split(self._module())
        split_averages(trainer, self._module(), self._patches)
        count_pipelines(trainer, self.mesh.num_replicas)
        set_example_aside(self._module(), self._patches)
        add_the_same_everywhere(trainer, self._patches)
        allow_skipping(trainer, self._patches)
        compute_for_bars(trainer, self._patches)
        refuse_missing_values(self._patches)
        logs_by(log_in_step, self._patches)
        keep_results_where_they_are(self._patches)
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._patches.set(loop, "inference_mode", False)  # what a step writes into is made in hooks, too
        path = self.broadcast(self._restore.path)
        has_shards = path is not None and is_sharded(Path(path))
        if not has_shards:  # as early as Lightning does
            self._restore()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            if self.mesh.num_ranks > 1:
                check_optimizers(self.optimizers)
        self.setup_precision_plugin()
        if self._offloads_shards:
            check_unscaled(self.precision_plugin)
        if trainer.state.fn == TrainerFn.FITTING:
            self._move_optimizers()
            self._norms = Norms(
                self._module().parameters, pipeline.shared, self.root_device, self.mesh.num_ranks, self.meet
            )
            adapt_to_pipeline(
                self.precision_plugin,
                self._norms,
                self._average_accumulated,
                self._patches,
            )
        if has_shards:  # with the states of optimizers
            self._restore()

    def _split(self, module: pl.LightningModule) -> Pipeline:
        is_fitting = module.trainer.state.fn == TrainerFn.FITTING
        self._pipeline = pipeline = build_pipeline(
            module,
            self._make_schedule,
            self.root_device,
            self.mesh.groups,
            self._patches,
            pipeline_module=self._pipeline_module,
            partition=self._partition,
            first_step=self._first_step if is_fitting else self._first_evaluation,
            provide=self._provide_optimizers,
            trains=is_fitting,
            num_microbatches=self._num_microbatches,
            local_device_index=self.local_rank,
            group=self.mesh.pipeline_group,
            replica_group=self.mesh.replica_group,
            tensor_group=self.mesh.tensor_group,
            sharding=self._sharding(),
            activation_checkpointing=self._activation_checkpointing,
            offload_activations=self._offload_activations,
            compile=self._compile,
            batching=self._batching,
            check_loss=self._check_loss,
            batch_norm=self._batch_norm,
            precise_gradients=self._precise_gradients,
            hold_uncalled=self._hold_uncalled,
            seed=self._seed,
            calls_outside_steps=True,
        )
        refuse_saving(module)
        if module.trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(f"pfo_pipeline: {pipeline.description}")
            for warning in pipeline.warnings:
                rank_zero_warn(f"pfo_pipeline: {warning}")
            reports = is_worth_a_report(module) if self._reports_memory is None else self._reports_memory
            say = partial(rank_zero_info, "pfo_pipeline: %s")
            self._memory = MemoryWatch(pipeline.forecast, say) if reports else None
        return pipeline

    @override
    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name == "run-stage":  # Lightning has noted the handlers that it finds, and its loops begin
            self._signals.hear_interrupts(self._module().trainer, self._patches)

    @property
    def divides_layers(self) -> bool:
        """Whether replicas divide layers among themselves, and so compute together."""
        return bool(self._zero_stage)

    def _sharding(self) -> Sharding | None:
        if not self._zero_stage:
            return None
        return Sharding(
            sharding_mesh(self.mesh, self._shard_size), self._zero_stage, self._shard_precision, self._offloads_shards
        )

    def _make_schedule(self, num_microbatches: int) -> PipelineSchedule:
        return make_checked_schedule(
            self._schedule_name, self.mesh.num_ranks, num_microbatches, self._stages_per_rank, self._max_in_flight
        )

    @override
    def model_to_device(self) -> None:
        move_local_tensors(self._module(), self.root_device)

    @override
    def teardown(self) -> None:
        self._patches.close()
        explain_missing_values(None)
        move_optimizers(self.optimizers, torch.device("cpu"))
        if self.lightning_module is not None:
            move_local_tensors(self.lightning_module, torch.device("cpu"))
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
