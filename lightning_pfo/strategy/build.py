"""Putting a pipeline together: this rank's part of a split model, and what runs steps on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.find import PipelinedModule
from lightning_pfo.strategy.model.layers import (
    check_compilable,
    compile_layers,
    recompute_activations,
)
from lightning_pfo.strategy.model.materialise import materialise
from lightning_pfo.strategy.model.ownership import (
    earlier_boundaries,
    find_shared_parameters,
    local_parameters,
    move_local_tensors,
    release_other_parts,
    remember_split,
)
from lightning_pfo.strategy.model.partition import Boundaries, describe_partition, partition_layers
from lightning_pfo.strategy.model.split import Split, find_split
from lightning_pfo.strategy.parallel.dtensor import is_divided_over
from lightning_pfo.strategy.parallel.fsdp import check_not_sharded, shard_over_replicas
from lightning_pfo.strategy.parallel.groups import copy_from_first
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.capture import StepRedirection
from lightning_pfo.strategy.step.layer_times import agree_on_layer_times
from lightning_pfo.strategy.step.runner import StepRunner
from lightning_pfo.strategy.watch.exit import let_collectives_settle_at_exit


@dataclass(frozen=True)
class Pipeline:
    """A model split over ranks, as one rank holds it.

    Attributes:
        engine: Runs the stages of this rank; where listeners subscribe.
        runner: Runs the user's steps on the engine.
        shared: Parameters that every rank holds.
        held: Parameters this rank holds.
        description: The stages, for people.
    """

    engine: PipelineEngine
    runner: StepRunner
    shared: list[nn.Parameter]
    held: list[nn.Parameter]
    description: str


def build_pipeline(
    model: nn.Module,
    make_schedule: Callable[[int], PipelineSchedule],
    device: torch.device,
    patches: Patches,
    *,
    owner: nn.Module | None = None,
    pipeline_module: str | None = None,
    partition: str = "uniform",
    measure: Callable[[PipelinedModule], list[float]] | None = None,
    num_microbatches: int | None = None,
    local_device_index: int = 0,
    group: dist.ProcessGroup | None = None,
    replica_group: dist.ProcessGroup | None = None,
    tensor_group: dist.ProcessGroup | None = None,
    shard_over: DeviceMesh | None = None,
    activation_checkpointing: bool = False,
    compile: bool = False,
    check_loss: bool = True,
    seed: int = 0,
) -> Pipeline:
    """Split `model` over the ranks of `group`, move this rank's part to `device`, and get ready to run steps.

    A collective call of all processes.

    The layers of other ranks become placeholders, so parameter objects change: make optimizers afterwards.

    Args:
        model: The user's module; changed in place.
        make_schedule: Makes the schedule of training iterations for a number of microbatches.
        device: Device of this rank.
        patches: Closing it gives the module back: its steps, layers and metrics are as the user wrote them.
        owner: The module that logs; None is `model`.
        pipeline_module: Dotted name of the module to split, see `find_pipelined_module`; None finds it when it is
            unambiguous.
        partition: Which layers go to which stage; see `partition_layers`.
        measure: For the partition `profile`, returns the time of each layer in seconds; called on the first rank only.
        num_microbatches: Microbatches per training batch, if they are known by now.
        local_device_index: Index of this rank's GPU on its node.
        group: The pipeline's processes; None is the world.
        replica_group: The processes that hold the same stages in other replicas; None where there is one replica.
        tensor_group: The processes that share this rank's layers; None without tensor parallelism.
        shard_over: The replicas that parameters are divided over; None keeps them whole.
        activation_checkpointing: Whether layers keep only their inputs and run again in backward.
        compile: Whether layers are compiled.
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses.
        seed: Seed shared by all ranks; random numbers inside a microbatch derive from it.

    Raises:
        ConfigurationError: If there are no or several candidates to split, the model was split otherwise before, or
            the schedule cannot run compiled layers.
        PartitionError: If the partition is impossible.
    """
    let_collectives_settle_at_exit()
    check_not_sharded(model)
    split = find_split(model, pipeline_module)
    # where stages are placed does not depend on the number of microbatches
    sample = make_schedule(num_microbatches or 4 * dist.get_world_size(group))
    if compile:
        check_compilable(sample)
    placement = [sample.rank_of(stage) for stage in range(sample.num_stages)]
    stages = sample.stages_of(dist.get_rank(group))
    boundaries, times_s = _boundaries(split, partition, sample.num_stages, measure)
    parts = split.parts(boundaries)
    remember_split(split.pipelined.module, boundaries, stages)
    materialise(model, parts, stages, find_shared_parameters(model, parts), device, seed)
    shared = find_shared_parameters(model, parts)
    release_other_parts(parts, stages, shared)
    move_local_tensors(model, device)
    _agree_on_initial_values(model, shared, group, replica_group, tensor_group)
    own_layers = [layer for stage in stages for layer in split.layers(stage, boundaries)]
    if activation_checkpointing:
        recompute_activations(split.pipelined.module, own_layers, patches)
    if compile:
        compile_layers(own_layers, patches)
    modules = {stage: split.stage_module(stage, boundaries, parts, device) for stage in stages}
    if shard_over is not None:
        shard_over_replicas((layer for module in modules.values() for layer in module.layers), shard_over, shared)
    engine = PipelineEngine(
        modules,
        placement,
        make_schedule,
        device,
        group=group,
        place=(_rank_in(replica_group), _rank_in(tensor_group)),
        local_device_index=local_device_index,
        seed=seed,
    )
    if num_microbatches is not None:
        engine.set_num_microbatches(num_microbatches)
    owner = model if owner is None else owner
    redirection = StepRedirection(owner, split.pipelined.module, split.pipelined.name)
    redirection.install(patches)
    held = local_parameters(model)
    runner = StepRunner(
        engine,
        owner,
        redirection,
        held,
        shared,
        list(model.parameters()),
        patches,
        replica_group,
        check_loss=check_loss,
        compiled=compile,
    )
    description = describe_partition(split.pipelined.name, boundaries, split.num_parameters, placement, times_s)
    return Pipeline(engine, runner, shared, held, description)


def _boundaries(
    split: Split, partition: str, num_stages: int, measure: Callable[[PipelinedModule], list[float]] | None
) -> tuple[Boundaries, list[float]]:
    """Where stages begin and end, and the times (s) of the layers where they were measured for it."""
    boundaries = earlier_boundaries(split.pipelined.module)
    if boundaries is not None and partition == "profile":  # layers can be measured only while all are there
        return boundaries, []
    times_s: list[float] = []
    if partition == "profile":
        times_s = agree_on_layer_times(measure and partial(measure, split.pipelined))
    return partition_layers(partition, split.num_parameters, num_stages, types=split.types, times_s=times_s), times_s


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _agree_on_initial_values(
    model: nn.Module,
    shared: Sequence[nn.Parameter],
    group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
    tensor_group: dist.ProcessGroup | None,
) -> None:
    """Without a common seed every process has made its own initial values."""
    held = [*local_parameters(model), *(buffer for buffer in model.buffers() if not buffer.is_meta)]
    copy_from_first(shared, group)
    if tensor_group is not None:
        copy_from_first([tensor for tensor in held if not isinstance(tensor, DTensor)], tensor_group)
    if replica_group is not None:
        copy_from_first([tensor for tensor in held if not is_divided_over(tensor, "data_parallel")], replica_group)
