"""Putting a pipeline together: this rank's part of a split model, and what runs steps on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.divide import divide
from lightning_pfo.strategy.earlier import remember_split
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.batch_norm import defer_batch_norms
from lightning_pfo.strategy.model.layers import (
    check_compilable,
    check_recomputable,
    compile_layers,
    recompute_activations,
)
from lightning_pfo.strategy.model.materialise import materialise
from lightning_pfo.strategy.model.memory import memory_of, warnings_of
from lightning_pfo.strategy.model.ownership import (
    check_initialised,
    check_scripted,
    check_unwrapped,
    local_parameters,
    move_local_tensors,
    parameters_by_end,
    release_others,
)
from lightning_pfo.strategy.model.partition import describe_partition
from lightning_pfo.strategy.model.reach.drawing import draw_alike
from lightning_pfo.strategy.model.reach.made_weights import make_weights_within
from lightning_pfo.strategy.model.tracing.backward_hooks import take_backward_hooks
from lightning_pfo.strategy.model.tracing.placeholders import explain_missing_values, mark_placeholders
from lightning_pfo.strategy.model.tracing.tracked import follow_units
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.dtensor import is_divided_over
from lightning_pfo.strategy.parallel.fsdp import ShardedLayers, Sharding, check_not_sharded, check_shardable
from lightning_pfo.strategy.parallel.groups import Groups, Shared, copy_from_first, share
from lightning_pfo.strategy.state.alike import AlikeWeights, copy_latest, share_changed_buffers
from lightning_pfo.strategy.state.initial import copy_first_values
from lightning_pfo.strategy.state.replica_buffers import ReplicaBuffers
from lightning_pfo.strategy.step.batches.batching import DEFAULT_BATCHING, Batching
from lightning_pfo.strategy.step.batches.notices import tell_of_counted
from lightning_pfo.strategy.step.batches.reading import Known
from lightning_pfo.strategy.step.batches.weights import shifts_labels
from lightning_pfo.strategy.step.by_units.calls import UnitCalls
from lightning_pfo.strategy.step.effects.outward.collectives import collectives_in_steps
from lightning_pfo.strategy.step.effects.outward.profiling import actions_in_steps
from lightning_pfo.strategy.step.effects.within import number_in_step, runs_alone, step_ends_here, within_step
from lightning_pfo.strategy.step.memory.forecast import MemoryForecast
from lightning_pfo.strategy.step.runner import StepRunner
from lightning_pfo.strategy.step.values import agree_on_trace
from lightning_pfo.strategy.watch.exit import let_collectives_settle_at_exit


@dataclass(frozen=True)
class Pipeline:
    """A model split over ranks, as one rank holds it.

    Attributes:
        engine: Runs the stages of this rank; where listeners subscribe.
        runner: Runs the user's steps on the engine.
        shared: What this rank holds together with others.
        held: Parameters this rank holds.
        means: Averages gradients over replicas; None where there is one.
        buffers: Gives replicas the first one's buffers, after steps whose gradients are averaged; None as above.
        forecast: Foretells the memory of training.
        description: The stages, for people.
        warnings: What people should know of how memory is divided.
    """

    engine: PipelineEngine
    runner: StepRunner
    shared: list[Shared]
    held: list[nn.Parameter]
    means: ReplicaMeans | None
    buffers: ReplicaBuffers | None
    forecast: MemoryForecast
    description: str
    warnings: list[str]


def build_pipeline(
    model: nn.Module,
    make_schedule: Callable[[int], PipelineSchedule],
    device: torch.device,
    groups: Groups,
    patches: Patches,
    *,
    pipeline_module: str | None = None,
    partition: str = "uniform",
    first_step: Callable[[], Callable[[torch.device], Any] | None] | None = None,
    provide: Callable[[], bool] = bool,
    trains: bool = True,
    num_microbatches: int | None = None,
    local_device_index: int = 0,
    group: dist.ProcessGroup | None = None,
    replica_group: dist.ProcessGroup | None = None,
    tensor_group: dist.ProcessGroup | None = None,
    sharding: Sharding | None = None,
    activation_checkpointing: str | None = None,
    offload_activations: bool = False,
    compile: bool = False,
    batching: Batching = DEFAULT_BATCHING,
    check_loss: bool = True,
    batch_norm: str = "microbatch",
    precise_gradients: bool = False,
    hold_uncalled: str = "everywhere",
    seed: int = 0,
    calls_outside_steps: bool = False,
) -> Pipeline:
    """Split `model` over the ranks of `group`, move this rank's part to `device`, and get ready to run steps.

    A collective call of all processes.

    The layers of other ranks become placeholders, so parameter objects change: make optimizers afterwards.

    Args:
        model: The user's module; changed in place.
        make_schedule: Makes the schedule of training iterations for a number of microbatches.
        device: Device of this rank.
        groups: Makes groups of processes.
        patches: Closing it gives the module back: its steps, layers and metrics are as the user wrote them.
        pipeline_module: Dotted name of the module whose layers are divided; None finds them, see `find_units`.
        partition: Which layers go to which stage; see `partition_layers`.
        first_step: Makes what runs the user's step on a first microbatch, on a device, or returns None. It shows the
            order in which the parts of the model are called, and for the partition `profile` how long they take.
        provide: Makes what that step may have missed if it fails, such as optimizers; tells whether there is something.
        trains: Whether that is a step of training, which stages have to run.
        num_microbatches: Microbatches per training batch, if they are known by now.
        local_device_index: Index of this rank's GPU on its node.
        group: The pipeline's processes; None is the world.
        replica_group: The processes that hold the same stages in other replicas; None where there is one replica.
        tensor_group: The processes that share this rank's layers; None without tensor parallelism.
        sharding: How layers are divided over the replicas; None keeps them whole.
        activation_checkpointing: How layers run again in backward; see `recompute_activations`. None: they do not.
        offload_activations: Whether what forwards save waits for backwards in the host's memory.
        compile: Whether layers are compiled.
        batching: How batches are divided, and how much each microbatch counts.
        check_loss: Whether the loss of the first batch is compared with the mean of its microbatches' losses.
        batch_norm: When batch norms update their running statistics; see `defer_batch_norms`.
        precise_gradients: Whether gradients of microbatches are added up in 32 bits where parameters have 16.
        hold_uncalled: Who holds what the first batch does not use; see `split_units`.
        seed: Seed shared by all ranks; random numbers inside a microbatch derive from it.
        calls_outside_steps: Whether all ranks may call the model together where no step is under way.

    Raises:
        ConfigurationError: If there are no or several candidates to split, the model was split otherwise before, or
            the schedule cannot run compiled layers.
        PartitionError: If the partition is impossible.
    """
    let_collectives_settle_at_exit()
    check_not_sharded(model)
    check_initialised(model)
    # where stages are placed does not depend on the number of microbatches
    sample = make_schedule(num_microbatches or 4 * dist.get_world_size(group))
    batching.check_schedule(sample)
    if compile:
        check_compilable(sample)
    if activation_checkpointing:
        check_recomputable(activation_checkpointing, sample)
    if sharding is not None:
        check_shardable(sharding, sample)
    if sample.num_stages > 1:
        check_scripted(model)
        check_unwrapped(model)
        tell_of_counted(model)
    placement = [sample.rank_of(stage) for stage in range(sample.num_stages)]
    stages = sample.stages_of(dist.get_rank(group))
    explain_missing_values(device)
    mark_placeholders(model)  # where it was made on meta
    draw_alike(device, patches)
    if dist.get_world_size(group) > 1 or tensor_group is not None:
        collectives_in_steps(replica_group, within_step, step_ends_here, runs_alone, number_in_step, patches)
    actions = actions_in_steps(model, within_step, patches)
    make_weights_within(model, patches)
    if dist.get_world_size() > 1:
        copy_first_values(model, groups.hosts(None))
    agree = partial(agree_on_trace, hosts=groups.hosts(None))  # all replicas are built together
    split, times_s = divide(
        model,
        pipeline_module,
        partition,
        sample.num_stages,
        first_step,
        device,
        agree,
        hold_uncalled,
        provide=provide,
        trains=trains,
        follows_weights=sharding is None and tensor_group is None and not batching.joins_microbatches,
    )
    remember_split(model, split, stages)
    materialise(model, split.held, stages, device, seed)
    release_others(model, split.held, stages)
    move_local_tensors(model, device)
    holders = {name: frozenset(placement[stage] for stage in of_name) for name, of_name in split.held.items()}
    shared = share(named_tensors(model), holders, group, groups)
    copy_latest(model, shared, placement[-1])
    _agree_on_initial_values(model, replica_group, tensor_group)
    deferred = defer_batch_norms(model, batch_norm, patches, compiles=compile)
    own_layers = list(dict.fromkeys(unit for stage in stages for unit in split.layers_of(stage)))
    if activation_checkpointing:
        recompute_activations(model, [unit.module for unit in own_layers], patches, activation_checkpointing)
    sharded = None
    if sharding is not None:
        kept_whole = [parameter for each in shared for parameter in each.parameters]
        sharded = ShardedLayers([unit.module for unit in own_layers], sharding, kept_whole)
    for unit in own_layers:
        unit.replacement = None if sharded is None else sharded.holders.get(unit.module)
    if compile:
        compile_layers(own_layers, patches)
    follow_units(split.units.all, patches)
    take_backward_hooks(model, split.units.all, patches)
    engine = PipelineEngine(
        stages,
        placement,
        make_schedule,
        device,
        groups,
        sharded=sharded,
        group=group,
        place=(_rank_in(replica_group), _rank_in(tensor_group)),
        local_device_index=local_device_index,
        seed=seed,
        offloads_activations=offload_activations,
    )
    if num_microbatches is not None:
        engine.set_num_microbatches(num_microbatches)
    means, buffers = None, None
    if replica_group is not None:
        means = ReplicaMeans(replica_group, groups.hosts(replica_group), precise=precise_gradients)
        buffers = ReplicaBuffers(model, replica_group, means.hosts)
    parameters = parameters_by_end(model, split.held, stages)
    runner = StepRunner(
        engine,
        model,
        split,
        parameters,
        shared,
        patches,
        replica_group,
        batching=replace(batching, shifted_labels=shifts_labels(model), known=batching.known or Known()),
        check_loss=check_loss,
        divided=sharded is not None,
        compiled=compile,
        deferred=deferred,
        means=means,
        precise_gradients=precise_gradients,
        when_calling=partial(share_changed_buffers, model, shared, placement[-1]),
        when_training=AlikeWeights(model, shared).keep,
        actions=actions,
    )
    forecast = MemoryForecast(
        engine,
        model,
        split,
        runner.programs,
        batching,
        parameters,
        shared,
        means,
        precise_gradients,
        sharding,
    )
    UnitCalls(split, model, engine, outside_steps=calls_outside_steps)
    groups.destroy_unused()  # now that those of this pipeline are made
    memory = memory_of(model, split, placement)
    partitioned = describe_partition(
        split.units.name, split.boundaries, memory.of_stages, placement, times_s, split.saved_bytes
    )
    warnings = warnings_of(model, memory, split, placement)
    if split.look and trains:
        warnings.append(f"{split.look} Layers that it had not come to by then are placed as the module has them.")
    description = f"{partitioned}\n{memory}"
    return Pipeline(engine, runner, shared, local_parameters(model), means, buffers, forecast, description, warnings)


def _rank_in(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _agree_on_initial_values(
    model: nn.Module, replica_group: dist.ProcessGroup | None, tensor_group: dist.ProcessGroup | None
) -> None:
    """Without a common seed every process has made its own initial values."""
    held = [*local_parameters(model), *(buffer for buffer in model.buffers() if not buffer.is_meta)]
    if tensor_group is not None:
        copy_from_first([tensor for tensor in held if not isinstance(tensor, DTensor)], tensor_group)
    if replica_group is not None:
        copy_from_first([tensor for tensor in held if not is_divided_over(tensor, "data_parallel")], replica_group)
