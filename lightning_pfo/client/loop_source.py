"""A foreign training loop as an instruction source, so that our listeners can be used on it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import EventEmitter, InstructionEvent, InstructionListener
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule


class LoopSource:
    """One rank of a loop that says when instructions begin and end.

    Making one is a collective call: hosts get a process group of their own.

    Args:
        pp_rank: Place in the pipeline.
        dp_rank: Replica.
        tp_rank: Part of the layers.
        device_id: CUDA's number of the GPU.
        world_size: Ranks of the job.
        pp_degree: Ranks of the pipeline.

    Raises:
        ConfigurationError: If there are several ranks, but no process group.
    """

    schedule: PipelineSchedule | None = None

    def __init__(
        self, pp_rank: int, dp_rank: int, tp_rank: int, *, device_id: int, world_size: int, pp_degree: int
    ) -> None:
        self.rank, self.place, self.stages = pp_rank, (dp_rank, tp_rank), (pp_rank,)
        self.local_device_index = device_id
        self.microbatch = ""
        self._num_ranks, self._pp_degree = world_size, pp_degree
        self._emitter = EventEmitter()
        self._step = 0
        self._counts: Counter[InstructionType] = Counter()
        self._group: Any = None
        if world_size > 1:
            if not dist.is_initialized():
                raise ConfigurationError(
                    f"A job of {world_size} ranks agrees over torch.distributed, which is not initialised. Make the "
                    "optimizer after init_process_group."
                )
            if dist.get_world_size() != world_size:
                raise ConfigurationError(
                    f"world_size is the number of processes, {dist.get_world_size()}; got {world_size}."
                )
            self._group = dist.new_group(backend="gloo")

    def add_listener(self, listener: InstructionListener, *, innermost: bool = False, outermost: bool = False) -> None:
        """See `InstructionSource`."""
        self._emitter.add(listener, innermost=innermost, outermost=outermost)

    def remove_listener(self, listener: InstructionListener) -> None:
        """See `InstructionSource`."""
        self._emitter.remove(listener)

    def count_work(self, enabled: bool) -> None:
        """A foreign loop does not count."""

    def synchronize(self) -> None:
        """See `InstructionSource`."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()

    def all_gather(self, value: Any, *, everywhere: bool = False) -> list[Any]:
        """Exchange a value with all ranks; those of the pipeline are among them."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(values, (self.rank, self.place, value), group=self._group)
        return [other for _, place, other in values if everywhere or place == self.place]

    def host_group(self, *, everywhere: bool = False) -> Any:
        """The group of all ranks."""
        return self._group

    # What the loop says.

    def begin_iteration(self, step: int) -> None:
        """A step begins."""
        self._step, self._counts = step, Counter()
        self._emitter.iteration_begin(step)

    def end_iteration(self) -> None:
        """A step is over."""
        self._emitter.iteration_end(self._step)

    def begin_instruction(self, kind: InstructionType) -> None:
        """An instruction begins."""
        if self._emitter:
            self._emitter.instruction_begin(self._event(kind))

    def end_instruction(self, kind: InstructionType) -> None:
        """An instruction is over."""
        if self._emitter:
            self._emitter.instruction_end(self._event(kind))
        self._counts[kind] += 1

    def _event(self, kind: InstructionType) -> InstructionEvent:
        return InstructionEvent(Instruction(self.rank, kind, self._counts[kind]), self._step)
