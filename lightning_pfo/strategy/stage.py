"""A torch pipeline stage that tells when its instructions begin and end.

Waiting for neighbours happens outside `forward_one_chunk` and `backward_one_chunk`, so an event spans computation only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionWork
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.strategy.work_counter import WorkCounter

CountedWork = dict[tuple[int, InstructionType], InstructionWork]
"""What one instruction of a stage and kind computes."""


class EventStage(PipelineStage):
    """`PipelineStage` with instruction events; in training, the forward of the last stage ends with its loss.

    Args:
        submodule: The layers of the stage.
        stage_index: Index of the stage.
        num_stages: Number of stages.
        device: Device of the stage.
        input_args: Example inputs (shapes, dtypes and `requires_grad` count).
        output_args: Example outputs.
        group: Process group of the pipeline; None is the world.
        emitter: Receives the events; None emits nothing.
        before_forward: Called with stage and microbatch when its inputs are there.
        loss_follows: A loss follows each forward; the caller says when it is there by `end_forward`.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        input_args: Any,
        output_args: Any,
        group: ProcessGroup | None,
        emitter: EventEmitter | None,
        before_forward: Callable[[int, int], None],
        loss_follows: bool,
    ) -> None:
        super().__init__(
            submodule, stage_index, num_stages, device, input_args=input_args, output_args=output_args, group=group
        )
        self._emitter = emitter
        self._before_forward = before_forward
        self._loss_follows = loss_follows
        self._open: tuple[Instruction, WorkCounter | None] | None = None
        self.iteration = 0
        self.counted_work: CountedWork | None = None

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run one forward; see `PipelineStage`."""
        self._begin(InstructionType.FORWARD, fwd_chunk_id)
        self._before_forward(self.stage_index, fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self._loss_follows:
            self.end_forward()
        return output

    def end_forward(self) -> None:
        """Close the forward; called from outside where a loss follows it."""
        self._end()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run one backward (input gradients only unless `full_backward`); see `PipelineStage`."""
        self._begin(
            InstructionType.BACKWARD if full_backward else InstructionType.INPUT_GRADIENT,
            bwd_chunk_id,
        )
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if bwd_chunk_id in self.bwd_cache:  # gloo sends contiguous tensors only
            self.bwd_cache[bwd_chunk_id] = tuple(
                gradient if gradient is None else gradient.contiguous() for gradient in self.bwd_cache[bwd_chunk_id]
            )
        self._end()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute one microbatch's weight gradients; see `PipelineStage`."""
        self._begin(InstructionType.WEIGHT_GRADIENT, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._end()

    def _begin(self, kind: InstructionType, microbatch: int) -> None:
        if not self._emitter:
            return
        instruction = Instruction(self.stage_index, kind, microbatch)
        self._emitter.instruction_begin(InstructionEvent(instruction, self.iteration))
        counter = None
        if self.counted_work is not None and (self.stage_index, kind) not in self.counted_work:
            counter = WorkCounter()
            counter.__enter__()
        self._open = (instruction, counter)

    def _end(self) -> None:
        if self._open is None:
            return
        (instruction, counter), self._open = self._open, None
        if counter is not None and self.counted_work is not None:
            counter.__exit__(None, None, None)
            self.counted_work[self.stage_index, instruction.type] = counter.work
        if self._emitter:
            work = (self.counted_work or {}).get((self.stage_index, instruction.type))
            self._emitter.instruction_end(InstructionEvent(instruction, self.iteration, work))
