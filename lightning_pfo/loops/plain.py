"""The pipeline for hand-written training loops: a module whose call runs one step of the whole pipeline."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.ranges import check_counts, check_switches
from lightning_pfo.core.schedules.registry import check_schedule_name
from lightning_pfo.core.schedules.validation import make_checked_schedule
from lightning_pfo.loops.call import ARGUMENTS, ModelCall, check_example
from lightning_pfo.loops.inputs import InputsWithGraph
from lightning_pfo.loops.noticing import check_at_first_step, refuse_ddp, refuse_grad, refuse_pipelined, tell_of_norms
from lightning_pfo.loops.outputs import EvaluationOutputs, LossOutput
from lightning_pfo.loops.state import ModelState
from lightning_pfo.loops.together import Together, meet_for_another, refuse_compiled, watch_others
from lightning_pfo.strategy.build import build_pipeline
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.ownership import check_uncalled
from lightning_pfo.strategy.model.partition import check_partition
from lightning_pfo.strategy.model.tracing.dividing.cutting import LeadsBackError
from lightning_pfo.strategy.model.tracing.placeholders import explain_missing_values
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.clipping import Norms, clip_for_torch
from lightning_pfo.strategy.parallel.loss_scaling import loss_scale_of, skip_together
from lightning_pfo.strategy.parallel.mesh import check_mesh_sizes, make_mesh
from lightning_pfo.strategy.state.placeholders import refuse_saving
from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.check import ranks_with_others
from lightning_pfo.strategy.step.batches.reading import Known
from lightning_pfo.strategy.step.batches.splitting import SplitBatch
from lightning_pfo.strategy.step.batches.weights import MicrobatchWeight
from lightning_pfo.strategy.step.effects.within import within_step
from lightning_pfo.strategy.step.memory.report import MemoryReport
from lightning_pfo.strategy.step.memory.watch import report_of
from lightning_pfo.strategy.watch.present import naming_who_has_ended

_log = logging.getLogger(__name__)


class PipelinedModel(ModelState):
    """A model split into pipeline stages, one or more per process of torch.distributed.

    In training its call runs all microbatches forward and backward through the pipeline and returns the batch's loss;
    `backward` on that loss hands out the gradients, so a loop stays as it was. In evaluation (`eval()` or
    `torch.no_grad()`) the call returns the loss, and other outputs when they are asked for. Every rank passes the same
    batch and gets the same. What is not here is the module's own, such as `config`.

    Parameters of other ranks' layers are placeholders on the meta device, which optimizers skip: make the optimizer
    after this object.

    Args:
        module: A module whose call computes the loss (a one-element tensor, or a dict with it under `loss`), or the
            output for `loss_fn`. Changed in place.
        loss_fn: `loss_fn(output, target)`; the call then takes the inputs of `module`, and the target last. A mean
            over samples, since the loss of a batch is the mean of its microbatches' losses.
        num_microbatches: Microbatches per batch; None chooses up to four per rank, see `default_num_microbatches`.
        pipeline_module: Dotted name of the module whose layers are divided; None finds them, see `find_units`.
        example_batch: A batch as the call takes it: a tuple of its arguments, or a dict of named ones. It shows the
            order in which layers are called, what else stages use, and for the partition `profile` how long layers
            take. Without it layers are taken to be called in the order in which the module holds them.
        partition: `uniform`, `parameters`, `type:REGEX` or `custom:0,8,14,21,27`; see `partition_layers`.
        schedule: A schedule's name or file; see `lightning_pfo.core.schedules.registry.make_schedule`.
        stages_per_rank: Stages on each rank; None is what the schedule is usually run with.
        max_in_flight: Refuse schedules that keep more activations (of a microbatch on a stage) on a rank.
        data_parallel_size: Number of replicas of the pipeline; each reads its own batches, and gradients are averaged.
        scaler: Scales the loss of fp16 autocast, as on one device: `scaler.scale(loss).backward()` (or `step`),
            `scaler.step(optimizer)`, `scaler.update()`. Where one rank finds an overflow, all skip the step.
        batch_dim: The dimension along which the tensors of a batch have samples.
        split_batch: A function `(batch, num_microbatches) -> microbatches` for batches that are not split along a
            dimension, where a batch is the pair of arguments and named arguments of the call.
        microbatch_weight: How much each microbatch counts in the loss of its batch: `auto`, `samples`, `tokens`,
            `sum`, or a function of a microbatch; see `PfoPipelineStrategy`.
        loss_over: `microbatch`, or `batch` for losses that compare samples; see `PfoPipelineStrategy`.
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses; see
            `PfoPipelineStrategy`.
        batch_norm: `microbatch`, or `deferred` running statistics of batch norms; see `PfoPipelineStrategy`.
        hold_uncalled: Whether what the example batch does not use is held `everywhere` or `once`; see
            `PfoPipelineStrategy`.
        device: Device of this rank; None is the current CUDA device under nccl, else the CPU.

    Attributes:
        patches: What was changed in objects of others; `release` undoes it.

    Raises:
        ConfigurationError: If there is no process group, or the model cannot be split as asked.

    Example::

        dist.init_process_group("gloo")
        model = PipelinedModel(net, nn.functional.cross_entropy, num_microbatches=8)
        optimizer = torch.optim.AdamW(model.parameters())
        for x, y in loader:
            loss = model.step(x, y)
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        *,
        num_microbatches: int | None = None,
        example_batch: Any = None,
        pipeline_module: str | None = None,
        partition: str = "uniform",
        schedule: str = "1f1b",
        stages_per_rank: int | None = None,
        max_in_flight: int | None = None,
        data_parallel_size: int = 1,
        scaler: GradScaler | None = None,
        batch_dim: int = 0,
        split_batch: SplitBatch | None = None,
        microbatch_weight: MicrobatchWeight = "auto",
        loss_over: str = "microbatch",
        check_loss: bool = True,
        batch_norm: str = "microbatch",
        hold_uncalled: str = "everywhere",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        refuse_pipelined(PipelinedModel, module)
        if not dist.is_initialized():
            raise ConfigurationError(
                "A pipeline runs on the processes of torch.distributed, and there is no process group. Start the "
                "script by `torchrun --nproc_per_node=4 script.py` and call "
                "torch.distributed.init_process_group('gloo') (or 'nccl') first."
            )
        check_mesh_sizes(data_parallel_size, 1, dist.get_world_size())
        check_schedule_name(schedule)
        check_uncalled(hold_uncalled)
        check_partition(partition)
        check_counts(num_microbatches=num_microbatches, stages_per_rank=stages_per_rank, max_in_flight=max_in_flight)
        check_switches(check_loss=check_loss)
        if split_batch is None:
            check_example(example_batch)
        meet_for_another()
        self.patches = Patches()
        device = _default_device() if device is None else device
        self.device = torch.empty(0, device=device).device  # as tensors say it, who know no "cpu:0"
        self.module = module  # what is set from here on may be its own, see `__setattr__`
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # nccl's transfers and the marks of instructions use the current one
        watch_others()
        self._mesh = make_mesh(self.device.type, data_parallel_size, 1, "dp_pp")
        self._scaler = scaler
        if scaler is not None:
            skip_together(scaler, self.patches)
        make_schedule = partial(
            make_checked_schedule,
            schedule,
            self._mesh.num_ranks,
            stages_per_rank=stages_per_rank,
            max_in_flight=max_in_flight,
        )
        batching = Batching(batch_dim, split_batch, microbatch_weight, loss_over, known=Known(ARGUMENTS))
        self._call = ModelCall(module, loss_fn, batching, self._mesh.num_ranks, make_schedule, num_microbatches)
        self._has_example = example_batch is not None
        self._averages, self._has_unaveraged = True, False
        self._num_evaluations = 0
        self._pipeline = build_pipeline(
            self,
            make_schedule,
            self.device,
            self._mesh.groups,
            self.patches,
            pipeline_module=None if pipeline_module is None else f"module.{pipeline_module}",
            partition=partition,
            first_step=partial(self._first_step, example_batch),
            num_microbatches=num_microbatches,
            local_device_index=int(os.environ.get("LOCAL_RANK", dist.get_rank())),
            group=self._mesh.pipeline_group,
            replica_group=self._mesh.replica_group,
            batching=batching,
            check_loss=check_loss,
            batch_norm=batch_norm,
            hold_uncalled=hold_uncalled,
            seed=random_state.synchronise(),
        )

        explain_missing_values(self.device, in_loop=True)
        refuse_saving(module)
        self._together = Together(self._pipeline.engine)
        self._together.meet_at_barriers(self.patches)
        self._refuse_compiled = torch.compiler.disable(refuse_compiled)  # type: ignore[no-untyped-call]
        self._outputs = EvaluationOutputs(self._pipeline.engine, self._together)
        self.adapt_saving()
        self._norms = Norms(
            self.parameters, self._pipeline.shared, self.device, self._mesh.num_ranks, self._together.meet
        )
        clip_for_torch(self._norms, within_step, self.patches)
        refuse_grad(self.parameters, self.patches)
        refuse_ddp(PipelinedModel, self.patches)
        if self._mesh.num_ranks > 1:
            tell_of_norms(self.parameters, self.patches)
            check_at_first_step(self.parameters, self.patches)
        if dist.get_rank() == 0:
            for warning in self._pipeline.warnings:
                _log.warning(warning)

    @property
    def loss_fn(self) -> Callable[[Any, Any], torch.Tensor] | None:
        """What makes the loss of outputs and a target; None where the module does."""
        return self._call.loss_fn

    @property
    def num_replicas(self) -> int:
        """Number of replicas of the pipeline; samplers are distributed over them, not over all processes."""
        return self._mesh.num_replicas

    @property
    def replica(self) -> int:
        """Which replica this process belongs to."""
        return self._mesh.replica

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The processes that hold the same stages in all replicas; None where there is one."""
        return self._mesh.replica_group

    @property
    def instruction_source(self) -> InstructionSource:
        """Where listeners subscribe to instruction events."""
        return self._pipeline.engine

    @property
    def description(self) -> str:
        """The stages, for people."""
        return self._pipeline.description

    def meet(self, what: str) -> None:
        """Say what comes next, so that ranks of the pipeline notice if others do not take part; see `Together.meet`."""
        self._together.meet(what)

    def ranks_with_others(self, data: Any) -> list[int]:
        """The ranks of this pipeline that give other data than its first; a collective call of them."""
        return ranks_with_others(data, self._mesh.pipeline_group, self.device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through the pipeline; a collective call, with the same batch on every rank.

        Args:
            *args: Arguments of the module, and with a `loss_fn` the target last. Every tensor has the batch size as
                its first dimension (0-dimensional tensors go to every microbatch).
            **kwargs: Further arguments of the module.

        Returns:
            The batch's loss, 0-dimensional, or a `LossOutput` if the module returns a dict. In training its `backward`
            adds the gradients, averaged over replicas, to those that are there; it hands inputs that have a graph
            their gradients. In evaluation the other outputs of the module are there too, for ranks that ask for
            them together.

        Raises:
            BatchError: If the batch cannot be split, or ranks pass different batches.
            ConfigurationError: On every rank, if the module returns no loss, or on the first batch one that is NaN or
                does not suit microbatches.
            RanksApartError: If other ranks do something else.
        """
        self._refuse_compiled(torch.compiler.is_compiling())
        batch = (args, kwargs)
        self._call.check(batch)
        if torch.is_grad_enabled():
            inputs = InputsWithGraph(batch)
            if inputs or self.training:
                return self._train(inputs)
        return self._evaluate(batch)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch forward and backward, and add the gradients to those that are there.

        Returns:
            The batch's loss, detached; arguments and errors as for the call.
        """
        output = self(*args, **kwargs)
        if output is None:
            raise ConfigurationError(
                "model.step() runs backward from the loss, and the loss function, or the module, has returned None. "
                "Return a loss; or to skip a batch call the model itself, and backward where it returns a loss."
            )
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @naming_who_has_ended()
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a batch without loss and gradients; a collective call.

        Args:
            *args: Arguments of the module.
            **kwargs: Further arguments of the module.

        Returns:
            What the module returns, the same on every rank of a replica: tensors of microbatches concatenated along
            dimension 0.
        """
        batch = (args, kwargs)
        self._together.begin("prediction", batch)
        with torch.no_grad():
            return self._pipeline.runner.evaluate(
                "predict", self._call.output, self._call.of_evaluation(batch), self._step_seed(2), batch, ()
            )

    @naming_who_has_ended()
    def foretell_memory(self, optimizers: Sequence[Optimizer], *args: Any, **kwargs: Any) -> MemoryReport | None:
        """How much memory each rank will take in a loop that zeroes gradients after each batch; it trains nothing.

        A collective call.

        Args:
            optimizers: The optimizers.
            *args: A batch, as the call takes it.
            **kwargs: Its named arguments.

        Returns:
            What ranks take when most of it is taken; to be printed. None if the module returns None for the batch.
        """
        batch = (args, kwargs)
        self._together.begin("memory report", batch)
        with torch.enable_grad():
            mine = self._pipeline.forecast.of(
                self._call.loss,
                self._call.of_training(batch),
                self._step_seed(0),
                batch,
                (),
                optimizers,
                keeps_gradients=False,
                wants_outputs=False,
            )
        return report_of(self._pipeline.engine, mine)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients as they are on each replica; the next `backward` outside averages all of them."""
        before, self._averages = self._averages, False
        try:
            yield
        finally:
            self._averages = before

    @naming_who_has_ended()
    def _train(self, inputs: InputsWithGraph) -> Any:
        self._together.begin("training", inputs.batch)
        number = self._call.num_microbatches = self._call.of_training(inputs.batch)
        loss_scale = loss_scale_of(self._scaler, self.device)
        self._has_unaveraged |= not self._averages
        with self._naming_example():
            output = self._pipeline.runner.train(
                self._call.loss,
                number,
                self._step_seed(0),
                inputs.batch,
                (),
                loss_scale,
                average=self._averages and not self._has_unaveraged,
                then=self._after_backward,
                outputs="nobody",  # beside the loss
            )
        if self._averages and self._pipeline.buffers is not None:
            self._pipeline.buffers.keep()
        loss: torch.Tensor = output["loss"] if isinstance(output, dict) else output
        if inputs:
            loss = inputs.attach(loss, self._mesh.pipeline_group, loss_scale)
        return LossOutput(loss=loss) if isinstance(output, dict) else loss

    @naming_who_has_ended()
    def _after_backward(self) -> None:
        if self._averages and self._has_unaveraged:  # with what has accumulated before
            if self._pipeline.means is not None:
                self._pipeline.means.average(self._pipeline.held)
            self._has_unaveraged = False

    @naming_who_has_ended()
    def _evaluate(self, batch: Any) -> Any:
        self._together.begin("evaluation", batch)
        call, seed = self._call, self._step_seed(1)
        with self._naming_example(), torch.no_grad():
            found = self._pipeline.runner.evaluate(
                "evaluation", call.evaluated, call.of_evaluation(batch), seed, batch, (), outputs="last"
            )
        return self._outputs.tell(found)

    @contextmanager
    def _naming_example(self) -> Iterator[None]:
        """Without an example layers are taken to be called as they are held; where they are not, one shows how."""
        try:
            yield
        except LeadsBackError as error:
            if self._has_example:
                raise
            raise LeadsBackError(
                f"{error} Or give PipelinedModel an example_batch, as the call takes it: (x, y), or a dict of named "
                f"arguments; it shows in which order parts are called."
            ) from error

    def _first_step(self, example: Any) -> Callable[[torch.device], Any] | None:
        return self._call.first_step(example)

    def _step_seed(self, kind: int) -> tuple[int, ...]:
        if kind == 0:
            return (kind, self.replica, self.iteration)
        self._num_evaluations += 1  # every batch has noise of its own
        return (kind, self.replica, self.iteration, self._num_evaluations)

    @naming_who_has_ended()
    def clip_grad_norm_(
        self, max_norm: float, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Clip the gradients of `parameters` (None: all) by their norm over all ranks; a collective call.

        Returns:
            The norm before clipping, the same on every rank.
        """
        clipped = list(self.parameters() if parameters is None else parameters)
        return self._norms.clip(clipped, max_norm, norm_type, called="clip_grad_norm_")

    def release(self) -> None:
        """Give the module, the scaler and the metrics back as they were, for use without the pipeline.

        Layers of other ranks stay placeholders; for all of them load `full_state_dict` into a new model.
        """
        self._together.end()
        self.patches.close()
        explain_missing_values(None)

    def types_have_changed(self) -> None:
        """Values between stages have other types too: steps are traced again."""
        self._pipeline.runner.programs.forget()

    def __getattr__(self, name: str) -> Any:
        """What is not the pipeline's own is the module's, such as `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set what is the module's there, as code does that reads it by `__getattr__` (`model.beta = 0.5`)."""
        is_own = name.startswith("_") or name in vars(self) or hasattr(type(self), name)
        module = None if is_own else vars(self)["_modules"].get("module")
        if module is not None and name != "module" and hasattr(module, name):
            setattr(module, name, value)
        else:
            super().__setattr__(name, value)


def _default_device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
