"""Pipeline parallelism for an Accelerate loop, which stays as it is.

::

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader = prepare_pipeline(accelerator, model, optimizer, loader, cross_entropy)
    scheduler = accelerator.prepare(scheduler)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = model(x, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

Accelerate has no place for other kinds of parallelism: it takes every process for a replica with data of its own. Where
that assumption shows (loaders, schedulers, clipping, gathering, checkpoints), methods of this one `Accelerator` are
replaced by ones that know of the pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import DistributedType, DynamoBackend, convert_to_fp32  # type: ignore[import-untyped]
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops.accelerator import adapt
from lightning_pfo.loops.call import first_batch
from lightning_pfo.loops.compat import knows_model, loaders_of, mark_prepared
from lightning_pfo.loops.loaders import check_adoptable
from lightning_pfo.loops.noticing import refuse_pipelined
from lightning_pfo.loops.optimizers import Replaced
from lightning_pfo.loops.outputs import LossOutput
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.splitting import SplitBatch
from lightning_pfo.strategy.step.batches.weights import MicrobatchWeight

_SUPPORTED = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
_PRECISIONS = ("no", "bf16", "fp16")


class AcceleratedPipeline(PipelinedModel):
    """A `PipelinedModel` that runs in the accelerator's mixed precision."""

    _autocast: Callable[[], AbstractContextManager[None]]

    def __init__(self, accelerator: Accelerator, *args: Any, loader: Any = None, **kwargs: Any) -> None:
        self.__dict__["_read_example"] = partial(first_batch, loader, args[0], accelerator.device)
        self.__dict__["_autocast"] = accelerator.autocast
        super().__init__(*args, scaler=accelerator.scaler, **kwargs)
        mark_prepared(self)  # `accelerator.prepare` leaves it alone, instead of wrapping it in DDP

    def _first_step(self, example: Any) -> Callable[[torch.device], Any] | None:
        read = self.__dict__.pop("_read_example")
        step = super()._first_step(read() if example is None else example)

        def run(device: torch.device) -> Any:
            assert step is not None
            with self._autocast():
                return step(device)

        return None if step is None else run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through the pipeline; see `PipelinedModel.forward`. Outputs are float32, as Accelerate's are."""
        with self._autocast():
            output = super().forward(*args, **kwargs)
        return output.converted(convert_to_fp32) if isinstance(output, LossOutput) else convert_to_fp32(output)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on a batch without loss and gradients; outputs are float32, as Accelerate's are."""
        with self._autocast():
            return convert_to_fp32(super().predict(*args, **kwargs))


def prepare_pipeline(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    dataloader: DataLoader[Any] | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    *,
    num_microbatches: int | None = None,
    partition: str = "uniform",
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    max_in_flight: int | None = None,
    data_parallel_size: int = 1,
    example_batch: Any = None,
    pipeline_module: str | None = None,
    batch_dim: int = 0,
    split_batch: SplitBatch | None = None,
    microbatch_weight: MicrobatchWeight = "auto",
    loss_over: str = "microbatch",
    check_loss: bool = True,
    batch_norm: str = "microbatch",
    hold_uncalled: str = "everywhere",
) -> tuple[AcceleratedPipeline, Any, Any]:
    """Split a model into pipeline stages, one or more per process, and prepare what belongs to it; a collective call.

    It takes the place of `accelerator.prepare(model, optimizer, dataloader)`. Prepare further loaders, optimizers and
    schedulers with `accelerator.prepare`, before or afterwards: every rank reads the same batches, and what Accelerate
    counts or gathers over processes (`num_processes`, `gather`, steps of schedulers) is over replicas. In a single
    process without torchrun, everything runs in one stage.

    Args:
        accelerator: The accelerator; its methods are adapted to the pipeline.
        model: A module whose call computes the loss, or the output for `loss_fn`; see `PipelinedModel`. Changed in
            place.
        optimizer: Its optimizer.
        dataloader: A DataLoader of whole batches.
        loss_fn: `loss_fn(output, target)`; the call of the model then takes the target as its last argument.
        num_microbatches: Microbatches per batch; None chooses up to four per rank.
        partition: `uniform`, `parameters`, `type:REGEX` or `custom:0,8,14,21,27`; see `partition_layers`.
        schedule: A schedule's name or file; see `lightning_pfo.core.schedules.registry.make_schedule`.
        stages_per_rank: Stages on each rank; None is what the schedule is usually run with.
        max_in_flight: Refuse schedules that keep more activations (of a microbatch on a stage) on a rank.
        data_parallel_size: Number of replicas of the pipeline. Each reads batches of its own, as the processes of DDP
            do, and gradients are averaged.
        example_batch: A batch as the call of the model takes it, by which layers are divided; see `PipelinedModel`.
            None is the loader's first batch, if its dataset has an index or can be copied.
        pipeline_module: Dotted name of the module whose layers are divided; None finds them.
        batch_dim: The dimension along which the tensors of a batch have samples.
        split_batch: Splits batches that are not split along a dimension; see `PipelinedModel`.
        microbatch_weight: How much each microbatch counts in the loss of its batch; see `PipelinedModel`.
        loss_over: `microbatch`, or `batch` for losses that compare samples; see `PipelinedModel`.
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses; see
            `PipelinedModel`.
        batch_norm: When batch norms update their running statistics, `microbatch` or `deferred`; see `PipelinedModel`.
        hold_uncalled: Who holds what the example batch does not use, `everywhere` or `once`; see `PipelinedModel`.

    Returns:
        The pipelined model, the prepared optimizer, and the prepared loader (None for what was None).

    Raises:
        ConfigurationError: If processes were not started as Accelerate needs it, the model was prepared before, or
            a loader was that cannot be adopted, the accelerator uses fp8 or another kind of parallelism, or the model
            cannot be split as asked.
    """
    _check_arguments(accelerator, model, optimizer, loss_fn)
    check_processes(accelerator)
    _refuse_unsupported(accelerator, model)
    _tell_of_compiling(accelerator)
    before = dict(model.named_parameters(remove_duplicate=False))
    pipeline = AcceleratedPipeline(
        accelerator,
        model,
        loss_fn,
        loader=dataloader,
        example_batch=example_batch,
        num_microbatches=num_microbatches,
        pipeline_module=pipeline_module,
        partition=partition,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        max_in_flight=max_in_flight,
        data_parallel_size=data_parallel_size,
        batch_dim=batch_dim,
        split_batch=split_batch,
        microbatch_weight=microbatch_weight,
        loss_over=loss_over,
        check_loss=check_loss,
        batch_norm=batch_norm,
        hold_uncalled=hold_uncalled,
        device=accelerator.device,
    )
    accelerator.print(f"lightning_pfo: {pipeline.description}")
    after = dict(model.named_parameters(remove_duplicate=False))
    adapt(accelerator, pipeline, Replaced((parameter, after[name]) for name, parameter in before.items()))
    prepared_optimizer = accelerator.prepare_optimizer(optimizer) if optimizer is not None else None
    prepared_loader = accelerator.prepare_data_loader(dataloader) if dataloader is not None else None
    return pipeline, prepared_optimizer, prepared_loader


def _check_arguments(accelerator: Any, model: Any, optimizer: Any, loss_fn: Any) -> None:
    given = {
        "accelerator": (accelerator, isinstance(accelerator, Accelerator)),
        "model": (model, isinstance(model, nn.Module)),
        "optimizer": (optimizer, optimizer is None or hasattr(optimizer, "param_groups")),
        "loss_fn": (loss_fn, loss_fn is None or (callable(loss_fn) and not isinstance(loss_fn, LRScheduler))),
    }
    for name, (value, is_right) in given.items():
        if is_right:
            continue
        raise ConfigurationError(
            f"prepare_pipeline(accelerator, model, optimizer, dataloader, loss_fn) takes these in this order; got a "
            f"{type(value).__name__} as {name}. Schedulers, further loaders and optimizers are prepared by "
            f"accelerator.prepare."
        )


def check_processes(accelerator: Accelerator) -> None:
    """Check that Accelerate sees all processes; in a single one, make a process group of one.

    Raises:
        ConfigurationError: If it does not.
    """
    if dist.is_initialized():
        if dist.get_world_size() != accelerator.state.num_processes:
            raise ConfigurationError(
                f"torch.distributed has {dist.get_world_size()} processes, but this Accelerator counts "
                f"{accelerator.state.num_processes}: without a GPU it must be told to use CPUs. Write "
                f"Accelerator(cpu=True), or set ACCELERATE_USE_CPU=true."
            )
        return
    if accelerator.state.num_processes > 1:
        raise ConfigurationError(
            f"This Accelerator counts {accelerator.state.num_processes} processes, and their process group is gone, as "
            f"after accelerator.end_training() or destroy_process_group(). Call it once, when all is done; between "
            f"trainings accelerator.free_memory() gives back what one has used."
        )
    # `accelerate launch` sets the first when it is asked for several processes, and leaves starting them to mpirun
    if "MASTER_PORT" in os.environ and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ConfigurationError(
            "`accelerate launch --cpu --num_processes N` starts a single process unless it has an MPI host file, and "
            "this one is alone. Start the processes with torchrun: `torchrun --nproc_per_node N script.py` with "
            "Accelerator(cpu=True), or `accelerate launch --cpu --no_python torchrun --nproc_per_node N script.py`."
        )
    backend = "cpu:gloo,cuda:nccl" if accelerator.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    accelerator.print(
        "lightning_pfo: this process is alone, so the pipeline has one stage. Start several by `torchrun "
        "--nproc_per_node N script.py` (on CPUs with Accelerator(cpu=True)), or `accelerate launch --multi_gpu "
        "--num_processes N script.py`."
    )


def _refuse_unsupported(accelerator: Accelerator, model: nn.Module) -> None:
    if accelerator.distributed_type not in _SUPPORTED:
        raise ConfigurationError(
            f"prepare_pipeline works with Accelerate's plain processes (MULTI_GPU, MULTI_CPU); this Accelerator uses "
            f"{accelerator.distributed_type.value}. Launch without --use_fsdp, --use_deepspeed, --use_megatron_lm."
        )
    if accelerator.mixed_precision not in _PRECISIONS:
        raise ConfigurationError(
            f"prepare_pipeline runs with mixed_precision {', '.join(map(repr, _PRECISIONS))}; got "
            f"{accelerator.mixed_precision!r}, which replaces layers in ways that were not tried on stages. Use "
            f"Accelerator(mixed_precision='bf16')."
        )
    refuse_pipelined(PipelinedModel, model)
    if isinstance(model, DistributedDataParallel) or knows_model(accelerator, model):
        raise ConfigurationError(
            "prepare_pipeline takes the model itself, but this one went through accelerator.prepare, which makes every "
            "process hold all of it. Leave the model out of accelerator.prepare."
        )
    for loader in loaders_of(accelerator):
        check_adoptable(loader)


def _tell_of_compiling(accelerator: Accelerator) -> None:
    """Accelerate compiles models in its own `prepare`, as a whole."""
    backend = accelerator.state.dynamo_plugin.backend
    if backend != DynamoBackend.NO and accelerator.is_main_process:
        warn_once(
            f"A model on a pipeline is not compiled as a whole, so that the accelerator's dynamo_plugin (or "
            f"dynamo_backend) has no effect; its backend is {backend.value}. Compile layers before "
            f"prepare_pipeline: layer.forward = torch.compile(layer.forward, backend={backend.value.lower()!r})."
        )
