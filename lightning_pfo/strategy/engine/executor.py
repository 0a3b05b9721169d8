"""Running a schedule on one rank: its instructions, sends and receives, in the order of `p2p.p2p_program`.

Posting a transfer never blocks. A rank waits at two places only: for the inputs of its next instruction, and at the end
of the iteration for its last sends. What it has posted before follows one order that all ranks share, so the transfers
of a program that `find_deadlock` has passed finish on every backend: gloo, where each goes its own way, and nccl, where
those of one direction share a queue (see `channels`).

gloo transfers host memory only: tensors of a GPU go by way of it, and the host waits for the GPU before each send. That
is for trying out, as several ranks on one GPU, which nccl refuses.

A receive gets its tensors when it is posted, and a send gives its tensors up when the peer is known to have them. So a
rank holds those of the microbatches in flight, however many an iteration has.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.p2p import Receive, Send, p2p_program
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.engine.channels import Channels
from lightning_pfo.strategy.engine.stage import Stage, Tensors
from lightning_pfo.strategy.parallel import groups
from lightning_pfo.strategy.parallel.groups import global_rank

WAITS_IN = frozenset({__file__, groups.__file__, distributed_c10d.__file__})
"""Source files in which a rank waits for others."""

AfterBackward = Callable[[int, Sequence[int]], None]
"""Takes the stage of a backward, and the stages of this rank that have done all of theirs by it."""

_OF_WEIGHTS = (InstructionType.BACKWARD, InstructionType.WEIGHT_GRADIENT)

_num_instructions = 0


def progress() -> int:
    """How many instructions this process has run."""
    return _num_instructions


class _Posted(NamedTuple):
    """A transfer that is under way.

    Attributes:
        number: Which of this rank's postings it belongs to.
        peer: The other rank.
        tensors: What is sent, or where it is received.
        works: What to wait for.
        arrived: The tensors that are received into in place of `tensors`, or those themselves.
    """

    number: int
    peer: int
    tensors: Tensors
    works: Sequence[dist.Work]
    arrived: Tensors = ()

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        for tensor, host in zip(self.tensors, self.arrived, strict=bool(self.arrived)):
            if host is not tensor:
                tensor.detach().copy_(host)
        return self.tensors


def goes_by_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether the group's backend cannot transfer this tensor from or into the memory where it is."""
    return tensor.device.type != "cpu" and dist.get_backend(group) == "gloo"


def _on_host(tensor: torch.Tensor, holds_data: bool) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return host.copy_(tensor.detach()) if holds_data else host


class Executor:
    """Runs iterations of a schedule on one rank.

    Args:
        schedule: What every rank executes.
        stages: The stages of this rank by index.
        group: Process group of the pipeline; None is the world.
        channels: Groups for transfers in one direction.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: Mapping[int, Stage],
        group: dist.ProcessGroup | None,
        channels: Channels,
    ) -> None:
        rank = dist.get_rank(group)
        self.stages = dict(stages)
        self._group = group
        self._channels = channels
        self._steps: list[Instruction | list[Send | Receive]] = []
        for step in p2p_program(schedule)[rank]:
            if isinstance(step, Instruction):
                self._steps.append(step)
            elif self._steps and isinstance(self._steps[-1], list):
                self._steps[-1].append(step)  # transfers that follow each other are posted together
            else:
                self._steps.append([step])
        self._local_consumer = {
            producer: consumer
            for producer, consumer in schedule.handovers().items()
            if schedule.rank_of(producer.stage) == schedule.rank_of(consumer.stage) == rank
        }
        order = schedule.orders[rank]
        self._ends = _ends_of(order)
        for index, stage in self.stages.items():
            stage.at_once = followed_at_once(order, index)
        self._ready: dict[Instruction, Tensors] = {}
        self._arriving: dict[Instruction, _Posted] = {}
        self._leaving: dict[int, deque[_Posted]] = defaultdict(deque)

    def run(self, after_backward: AfterBackward | None = None) -> None:
        """Run one iteration; a collective call of the pipeline's ranks.

        Args:
            after_backward: Called after each backward, and each weight gradient.
        """
        try:
            for number, step in enumerate(self._steps):
                if isinstance(step, Instruction):
                    self._compute(step)
                    if after_backward is not None and step.type in _OF_WEIGHTS:
                        after_backward(step.stage, self._ends.get(step, ()))
                else:
                    self._post(number, step)
            for peer in self._leaving:
                self._finish_sends(peer, len(self._steps))
        finally:
            self._ready.clear()
            self._arriving.clear()
            self._leaving.clear()
            for stage in self.stages.values():
                stage.forget()

    def _compute(self, instruction: Instruction) -> None:
        received = self._ready.pop(instruction, ())
        if instruction in self._arriving:
            posted = self._arriving.pop(instruction)
            received = posted.wait()
            # the peer has posted its ends of what this rank sent it before, so this does not block for long
            self._finish_sends(posted.peer, posted.number)
        global _num_instructions
        _num_instructions += 1
        produced = self.stages[instruction.stage].run(instruction, received)
        # under the name of who needs it here, or of who made it if it leaves: its send follows
        self._ready[self._local_consumer.get(instruction, instruction)] = produced

    def _post(self, number: int, steps: Sequence[Send | Receive]) -> None:
        for step in steps:
            transfer = step.transfer
            call: Any
            if isinstance(step, Send):
                call, end, peer = dist.isend, "group_dst", transfer.destination
                tensors = self._ready.pop(transfer.producer)
            else:
                call, end, peer = dist.irecv, "group_src", transfer.source
                tensors = self.stages[transfer.consumer.stage].make_buffers(transfer.consumer)
            sent = self._transferable(tensors, holds_data=isinstance(step, Send))
            channel = self._channels.get((transfer.source, transfer.destination))
            if channel is None:
                works = [call(tensor, group=self._group, **{end: peer}) for tensor in sent]
            else:  # all at once: in a queue they would be many kernels
                peer_in_world = global_rank(self._group, peer)
                operations = [dist.P2POp(call, tensor, peer_in_world, channel) for tensor in sent]
                works = dist.batch_isend_irecv(operations) if operations else []
            if isinstance(step, Send):
                self._leaving[peer].append(_Posted(number, peer, sent, works))
            else:
                self._arriving[transfer.consumer] = _Posted(number, peer, tensors, works, sent)

    def _transferable(self, tensors: Tensors, *, holds_data: bool) -> Tensors:
        """The tensors, or in place of those that go by the host others there, with their data if they hold any."""
        return tuple(
            _on_host(tensor, holds_data) if goes_by_host(tensor, self._group) else tensor for tensor in tensors
        )

    def _finish_sends(self, peer: int, number: int) -> None:
        """Wait for sends to `peer` that were posted up to posting `number`, and let their tensors go."""
        sends = self._leaving[peer]
        while sends and sends[0].number <= number:
            sends.popleft().wait()


def followed_at_once(order: Sequence[Instruction], stage: int) -> frozenset[int]:
    """The microbatches of a stage whose backward is what a rank does after their forward."""
    return frozenset(
        one.microbatch
        for one, two in pairwise(order)
        if one.type is InstructionType.FORWARD and (one.stage, one.microbatch) == (stage, two.microbatch)
        if two.stage == stage
    )


def _ends_of(order: Sequence[Instruction]) -> dict[Instruction, list[int]]:
    """The stages that have done all their backwards by an instruction, from the last one on in any schedule.

    A stage counts when those behind it have ended too, so that replicas under other schedules, as of a short batch,
    see the same order.
    """
    last = {inst.stage: position for position, inst in enumerate(order) if inst.type in _OF_WEIGHTS}
    ends: dict[Instruction, list[int]] = {}
    position = 0
    for stage in sorted(last, reverse=True):
        position = max(position, last[stage])
        ends.setdefault(order[position], []).append(stage)
    return ends
