"""Running a schedule on one rank: its instructions, sends and receives, in the order of `p2p.p2p_program`.

Posting a transfer never blocks. A rank waits at two places only: for the inputs of its next instruction, and at the end
of the iteration for its last sends. What it has posted before follows one order that all ranks share, so the transfers
of a program that `find_deadlock` has passed finish on every backend: gloo, where each goes its own way, and nccl, where
those of one direction share a queue (see `channels`).

A receive gets its tensors when it is posted, and a send gives its tensors up when the peer is known to have them (see
`transfers`). So a rank holds those of the microbatches in flight, however many an iteration has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from torch.distributed import distributed_c10d

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.p2p import Receive, Send, p2p_program
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.engine import transfers
from lightning_pfo.strategy.engine.stage import Stage, Tensors
from lightning_pfo.strategy.engine.transfers import Transfers
from lightning_pfo.strategy.parallel import groups

WAITS_IN = frozenset({__file__, transfers.__file__, groups.__file__, distributed_c10d.__file__})
"""Source files in which a rank waits for others."""

AfterBackward = Callable[[int, Sequence[int]], None]
"""Takes the stage of a backward, and the stages of this rank that have done all of theirs by it."""

_OF_WEIGHTS = (InstructionType.BACKWARD, InstructionType.WEIGHT_GRADIENT)

_num_instructions = 0


def progress() -> int:
    """How many instructions this process has run."""
    return _num_instructions


class Executor:
    """Runs iterations of a schedule on one rank.

    Args:
        schedule: What every rank executes.
        rank: This rank.
        stages: Its stages by index.
        transfers: Its transfers.
    """

    def __init__(
        self, schedule: PipelineSchedule, rank: int, stages: Mapping[int, Stage], transfers: Transfers
    ) -> None:
        self.stages = dict(stages)
        self._transfers = transfers
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
                        self._call_after(after_backward, step)
                else:
                    self._post(number, step)
            self._transfers.finish()
            for stage in self.stages.values():
                stage.end()
        finally:
            self._ready.clear()
            self._transfers.forget()
            for stage in self.stages.values():
                stage.forget()

    def _compute(self, instruction: Instruction) -> None:
        received = self._transfers.wait_for(instruction)
        if received is None:
            received = self._ready.pop(instruction, ())
        global _num_instructions
        _num_instructions += 1
        produced = self.stages[instruction.stage].run(instruction, received)
        # under the name of who needs it here, or of who made it if it leaves: its send follows
        self._ready[self._local_consumer.get(instruction, instruction)] = produced

    def _call_after(self, after_backward: AfterBackward, step: Instruction) -> None:
        stage = self.stages[step.stage]
        try:
            after_backward(step.stage, self._ends.get(step, ()))
        except Exception as error:  # as an error of the stage: other ranks would wait for what it is to send
            stage.failure = stage.failure or error

    def _post(self, number: int, steps: Sequence[Send | Receive]) -> None:
        for step in steps:
            if isinstance(step, Send):
                self._transfers.send(number, step.transfer, self._ready.pop(step.transfer.producer))
            else:
                self._transfers.receive(number, step.transfer)


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
