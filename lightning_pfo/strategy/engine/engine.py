"""The pipeline engine of one rank: runs microbatches through its stages and emits instruction events.

It knows nothing of Lightning. A caller provides the user's step, what each stage does of it, and on the rank of the
last stage a function that turns what the step returns into a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.events import EventEmitter, InstructionListener
from lightning_pfo.core.schedules.schedule import PipelineSchedule, all_forwards_first, forward_only
from lightning_pfo.strategy.engine.channels import make_channels
from lightning_pfo.strategy.engine.executor import AfterBackward, Executor
from lightning_pfo.strategy.engine.offload import Offload
from lightning_pfo.strategy.engine.stage import CountedWork, Stage
from lightning_pfo.strategy.engine.transfers import Transfers
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.parallel.fsdp import ShardedLayers
from lightning_pfo.strategy.parallel.groups import Groups, tell_each_other

LossFunction = Callable[[Any, int], torch.Tensor]
"""Maps what the step returned for a microbatch, and the microbatch's index, to a loss."""

Step = Callable[[int, int], Any]
"""Runs the user's step on a stage and a microbatch."""


class PipelineEngine:
    """Runs the stages of one rank; implements `lightning_pfo.core.events.InstructionSource`.

    Args:
        stages: The stages of this rank.
        placement: Rank of every stage.
        make_schedule: Makes the schedule of training iterations for a number of microbatches.
        device: Device of this rank.
        groups: Makes groups of processes.
        sharded: What of these stages is divided over replicas; None: nothing.
        group: Process group of the pipeline; None is the world.
        place: Which replica of the pipeline, and which part of its layers, this process is.
        local_device_index: Index of this rank's GPU on its node.
        seed: Seed shared by all ranks; random numbers inside a microbatch derive from it.
        offloads_activations: Whether what forwards save waits for backwards in the host's memory.
    """

    def __init__(
        self,
        stages: Iterable[int],
        placement: Sequence[int],
        make_schedule: Callable[[int], PipelineSchedule],
        device: torch.device,
        groups: Groups,
        *,
        sharded: ShardedLayers | None = None,
        group: dist.ProcessGroup | None = None,
        place: tuple[int, int] = (0, 0),
        local_device_index: int = 0,
        seed: int = 0,
        offloads_activations: bool = False,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.num_stages = len(placement)
        self.stages = tuple(sorted(stages))
        self.last_rank = placement[-1]
        self.local_device_index = local_device_index
        self.device = device
        self.group = group
        self.place = place
        self.schedule: PipelineSchedule | None = None
        self.microbatch = ""
        self.iteration = 0
        self._groups = groups
        self._channels = make_channels(placement, group, groups)
        self._sharded = sharded
        self.placement = tuple(placement)
        self._make_schedule = make_schedule
        self.seed = seed
        self.offload = Offload(device) if offloads_activations else None
        self._emitter = EventEmitter()
        self._counted_work: CountedWork | None = None
        self._hosts: dict[bool, dist.ProcessGroup | None] = {}
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._loss_function: LossFunction | None = None

    @property
    def is_running(self) -> bool:
        """Whether an iteration is under way; layers that are recomputed are called in its backwards."""
        return self._loss_function is not None

    @property
    def is_first(self) -> bool:
        """Whether this rank feeds the pipeline."""
        return 0 in self.stages

    @property
    def is_speaker(self) -> bool:
        """Whether this rank, the first of the first replica, says what is to be said once."""
        return self.rank == 0 and self.place == (0, 0)

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.num_stages - 1 in self.stages

    def add_listener(self, listener: InstructionListener, *, innermost: bool = False, outermost: bool = False) -> None:
        """See `InstructionSource.add_listener`."""
        self._emitter.add(listener, innermost=innermost, outermost=outermost)

    def remove_listener(self, listener: InstructionListener) -> None:
        """See `InstructionSource.remove_listener`."""
        self._emitter.remove(listener)

    def count_work(self, enabled: bool) -> None:
        """See `InstructionSource.count_work`."""
        if not enabled:
            self._counted_work = None
        elif self._counted_work is None:
            self._counted_work = {}

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def all_gather(self, value: Any, *, everywhere: bool = False) -> list[Any]:
        """See `InstructionSource.all_gather`; hosts talk to each other, none waits for its device as with nccl."""
        return tell_each_other(value, self.host_group(everywhere=everywhere))

    def host_group(self, *, everywhere: bool = False) -> dist.ProcessGroup | None:
        """See `InstructionSource.host_group`."""
        if everywhere not in self._hosts:
            self._hosts[everywhere] = self._groups.hosts(None if everywhere else self.group)
        return self._hosts[everywhere]

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Fix the number of microbatches of training iterations, which makes `schedule` known.

        Raises:
            ConfigurationError: If the schedule cannot run that many.
        """
        if self.schedule is None or self.schedule.num_microbatches != num_microbatches:
            self.schedule = self._make_schedule(num_microbatches)
            self.microbatch = ""  # has another size now
            self._executors.clear()

    def iteration_begin(self) -> None:
        """Tell listeners that a training iteration begins."""
        if self._emitter:
            self._emitter.iteration_begin(self.iteration)

    def iteration_end(self) -> None:
        """Tell listeners that all ranks have finished the iteration."""
        if self._emitter:
            self._emitter.iteration_end(self.iteration)
        self.iteration += 1

    def run(
        self,
        programs: Sequence[Sequence[StageProgram]],
        step_seed: tuple[int, ...],
        step: Step,
        loss_function: LossFunction,
        *,
        train: bool,
        after_backward: AfterBackward | None = None,
        memory: Sequence[dict[int, torch.Tensor]] = (),
        differentiates: bool = False,
    ) -> list[set[int]]:
        """Run all microbatches forward, and in training backward; gradients are left in `.grad`.

        Args:
            programs: What the stages do of each microbatch; equal on all ranks.
            step_seed: Makes the random numbers of this step differ from those of others; equal on all ranks.
            step: The user's step; called in each forward of every stage.
            loss_function: Called on the rank of the last stage only; in training its sum over microbatches is
                differentiated.
            train: Whether to run backward.
            after_backward: Called after each backward, and each weight gradient.
            memory: Of each microbatch the values that phases of the step compute for later ones.
            differentiates: Whether forwards without backwards keep what the step itself differentiates by.

        Returns:
            For each stage of this rank the microbatches of which the step has called nothing, but returned None.

        Raises:
            Exception: The first error of a stage of this rank; the iteration is finished first, since other ranks
                would wait for this one.
        """
        self._loss_function = loss_function
        executor = self._executor(len(programs), train)
        try:
            for index, stage in executor.stages.items():
                stage.programs = [of_stages[index] for of_stages in programs]
                stage.step = step
                stage.seed = (self.seed, *step_seed)
                stage.iteration = self.iteration
                stage.counted_work = self._counted_work
                stage.failure = None
                stage.memory = memory
                stage.skipped = set()
            if train and self._sharded is not None:
                self._sharded.begin()
            with torch.set_grad_enabled(train or differentiates):
                executor.run(after_backward)
            if train and self._sharded is not None:
                self._sharded.end()
            failure = next((stage.failure for stage in executor.stages.values() if stage.failure), None)
            if failure is not None:
                raise failure
            return [stage.skipped for stage in executor.stages.values()]
        finally:
            self._loss_function = None
            for stage in executor.stages.values():
                stage.programs, stage.step, stage.failure, stage.memory = (), None, None, ()
            if not train and self._sharded is not None:
                self._sharded.release()

    def _executor(self, num_microbatches: int, train: bool) -> Executor:
        assert self.schedule is not None or not train
        is_ordinary = train and self.schedule is not None and self.schedule.num_microbatches == num_microbatches
        if (train, num_microbatches) not in self._executors:
            schedule = self.schedule if is_ordinary else None
            if schedule is None:  # of a batch with few samples, or evaluation
                schedule = (all_forwards_first if train else forward_only)(self.placement, num_microbatches)
            stages = {stage: self._make_stage(stage, train, tell=is_ordinary) for stage in self.stages}
            transfers = Transfers(schedule, stages, self.group, self._channels, self.host_group())
            self._executors[train, num_microbatches] = Executor(schedule, self.rank, stages, transfers)
        return self._executors[train, num_microbatches]

    def _make_stage(self, stage: int, train: bool, *, tell: bool = False) -> Stage:
        return Stage(
            stage,
            self.device,
            emitter=self._emitter if tell else None,
            compute_loss=self._compute_loss if stage == self.num_stages - 1 else None,
            train=train,
            offload=self.offload,
        )

    def _compute_loss(self, output: Any, microbatch: int) -> torch.Tensor:
        assert self._loss_function is not None
        return self._loss_function(output, microbatch)
