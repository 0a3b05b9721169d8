"""The pipeline engine of one rank: runs microbatches through its stages and emits instruction events.

It knows nothing of Lightning. A caller provides, on the rank of the first stage, the inputs of each microbatch, and on
the rank of the last stage a function that turns the model's output into a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.events import EventEmitter, InstructionListener
from lightning_pfo.core.schedules.schedule import PipelineSchedule, forward_only
from lightning_pfo.strategy.engine.executor import Executor
from lightning_pfo.strategy.engine.shapes import StageShapes, infer_shapes
from lightning_pfo.strategy.engine.stage import CountedWork, Stage
from lightning_pfo.strategy.model.sequential import ModuleInputs, StageModule
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.fsdp import accumulate_only, reduce_over_replicas, release_gathered
from lightning_pfo.strategy.parallel.groups import host_group

LossFunction = Callable[[Any, int], torch.Tensor]
"""Maps the model's output for a microbatch and the microbatch's index to a loss."""


class PipelineEngine:
    """Runs the stages of one rank; implements `lightning_pfo.core.events.InstructionSource`.

    Args:
        modules: What each stage of this rank runs, on `device`.
        placement: Rank of every stage.
        make_schedule: Makes the schedule of training iterations for a number of microbatches.
        device: Device of this rank.
        group: Process group of the pipeline; None is the world.
        place: Which replica of the pipeline, and which part of its layers, this process is.
        local_device_index: Index of this rank's GPU on its node.
        seed: Seed shared by all ranks; random numbers inside a microbatch derive from it.
    """

    def __init__(
        self,
        modules: Mapping[int, StageModule],
        placement: Sequence[int],
        make_schedule: Callable[[int], PipelineSchedule],
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        place: tuple[int, int] = (0, 0),
        local_device_index: int = 0,
        seed: int = 0,
    ) -> None:
        self.rank = dist.get_rank(group)
        self.num_stages = len(placement)
        self.stages = tuple(sorted(modules))
        self.last_rank = placement[-1]
        self.local_device_index = local_device_index
        self.device = device
        self.group = group
        self.place = place
        self.schedule: PipelineSchedule | None = None
        self.iteration = 0
        self._layers = [layer for module in modules.values() for layer in module.layers]
        self._placement = tuple(placement)
        self._make_schedule = make_schedule
        self.seed = seed
        self._emitter = EventEmitter()
        self._counted_work: CountedWork | None = None
        self._modules = dict(modules)
        self._hosts: dict[bool, dist.ProcessGroup | None] = {}
        self._executors: dict[Any, tuple[Executor, dict[int, Any]]] = {}
        self._inputs: Callable[[int], ModuleInputs] | None = None
        self._loss_function: LossFunction | None = None
        self._step_seed: tuple[int, ...] = ()

    @property
    def is_first(self) -> bool:
        """Whether this rank feeds the pipeline."""
        return 0 in self._modules

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.num_stages - 1 in self._modules

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
        group = self.host_group(everywhere=everywhere)
        values: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(values, value, group=group)
        return values

    def host_group(self, *, everywhere: bool = False) -> dist.ProcessGroup | None:
        """See `InstructionSource.host_group`."""
        if everywhere not in self._hosts:
            self._hosts[everywhere] = host_group(None if everywhere else self.group, self.device)
        return self._hosts[everywhere]

    def set_num_microbatches(self, num_microbatches: int) -> None:
        """Fix the number of microbatches of training iterations, which makes `schedule` known.

        Raises:
            ConfigurationError: If the schedule cannot run that many.
        """
        if self.schedule is None or self.schedule.num_microbatches != num_microbatches:
            self.schedule = self._make_schedule(num_microbatches)

    def iteration_begin(self) -> None:
        """Tell listeners that a training iteration begins."""
        if self._emitter:
            self._emitter.iteration_begin(self.iteration)

    def iteration_end(self) -> None:
        """Tell listeners that all ranks have finished the iteration."""
        if self._emitter:
            self._emitter.iteration_end(self.iteration)
        self.iteration += 1

    def prepare(
        self,
        num_microbatches: int,
        signature: Any,
        step_seed: tuple[int, ...],
        inputs: Callable[[int], ModuleInputs],
    ) -> None:
        """Find what stages send each other in a forward-only run; an error is raised on every rank.

        Args: as for `run`.
        """
        self._step_seed = step_seed
        self._inputs = inputs
        try:
            self._executors[(False, num_microbatches, signature)] = self._make_executor(num_microbatches, train=False)
        finally:
            self._let_go(train=False)

    def forget(self, signature: Any) -> None:
        """Drop what is kept for microbatches of this signature."""
        self._executors = {key: value for key, value in self._executors.items() if key[2] != signature}

    def run(
        self,
        num_microbatches: int,
        signature: Any,
        step_seed: tuple[int, ...],
        inputs: Callable[[int], ModuleInputs],
        loss_function: LossFunction,
        *,
        train: bool,
    ) -> None:
        """Run all microbatches forward, and in training backward; gradients are left in `.grad`.

        Args:
            num_microbatches: Number of microbatches.
            signature: Hashable description of shapes and dtypes of a microbatch, equal on all ranks.
            step_seed: Makes the random numbers of this step differ from those of others; equal on all ranks.
            inputs: Called in each forward of the first stage, and of every stage that takes inputs; returns the model's
                inputs for a microbatch.
            loss_function: Called on the rank of the last stage only; in training its sum over microbatches is
                differentiated.
            train: Whether to run backward.

        Raises:
            PfoError: If a stage fails on its first microbatch; raised on every rank.
        """
        self._step_seed = step_seed
        self._inputs = inputs
        self._loss_function = loss_function
        key = (train, num_microbatches, signature)
        try:
            if key not in self._executors:
                self._executors[key] = self._make_executor(num_microbatches, train)
            executor, layouts = self._executors[key]
            for index, stage in executor.stages.items():
                self._modules[index].layout = layouts[index]
                stage.iteration = self.iteration
                stage.counted_work = self._counted_work
            if train:
                accumulate_only(self._layers)
            with torch.set_grad_enabled(train):
                executor.run()
            if train:
                reduce_over_replicas(self._layers)
        finally:
            self._let_go(train)

    def _let_go(self, train: bool) -> None:
        for module in self._modules.values():
            module.inputs = {}
            module.output = None
        self._inputs = None
        self._loss_function = None
        if not train:
            release_gathered(self._layers)

    def _make_executor(self, num_microbatches: int, train: bool) -> tuple[Executor, dict[int, Any]]:
        shapes = infer_shapes(
            self._modules, self._placement, self.device, self.group, before_forward=self._before_forward, train=train
        )
        stages = {stage: self._make_stage(stage, shapes[stage], train) for stage in self.stages}
        schedule = self.schedule if train else forward_only(self._placement, num_microbatches)
        assert schedule is not None
        layouts = {stage: module.layout for stage, module in self._modules.items()}
        return Executor(schedule, stages, self.group), layouts

    def _make_stage(self, stage: int, shapes: StageShapes, train: bool) -> Stage:
        return Stage(
            stage,
            self._modules[stage],
            shapes,
            self.device,
            emitter=self._emitter if train else None,
            before_forward=self._before_forward,
            compute_loss=self._compute_loss if stage == self.num_stages - 1 else None,
            train=train,
        )

    def _before_forward(self, stage: int, microbatch: int) -> None:
        module = self._modules[stage]
        takes_inputs = module.is_first or module.takes_inputs_everywhere
        if takes_inputs and microbatch not in module.inputs:  # the trial forward has left that of microbatch 0
            assert self._inputs is not None
            module.inputs = {microbatch: self._inputs(microbatch)}
        random_state.seed(self.device, self.seed, *self._step_seed, microbatch, 1 + stage)

    def _compute_loss(self, output: Any, microbatch: int) -> torch.Tensor:
        assert self._loss_function is not None
        return self._loss_function(output, microbatch)
