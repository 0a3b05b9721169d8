"""The memory of a rank over one iteration: what instructions take, in the order of the schedule."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.p2p import Receive, Send, p2p_program
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.step.memory.costs import OF_WEIGHTS, StageCosts

_OF_GRADIENTS = (InstructionType.BACKWARD, InstructionType.INPUT_GRADIENT)


@dataclass(frozen=True)
class Moment:
    """When an iteration takes most memory of a rank.

    Attributes:
        activation_bytes: What microbatches in flight keep, and the instruction that runs makes.
        transfer_bytes: What is received, or on its way to others.
        gradient_bytes: Gradients of parameters.
        instruction: What runs.
    """

    activation_bytes: int
    transfer_bytes: int
    gradient_bytes: int
    instruction: str

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.activation_bytes + self.transfer_bytes + self.gradient_bytes


class Timeline:
    """Goes through an iteration of one rank.

    Args:
        schedule: What all ranks execute.
        rank: The rank.
        costs: What instructions of its stages take.
        bucket_bytes: What the exchange of a stage's gradients takes beside them.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        rank: int,
        costs: Mapping[int, StageCosts],
        bucket_bytes: Callable[[int], int],
    ) -> None:
        self._schedule = schedule
        self._rank = rank
        self._costs = costs
        self._bucket_bytes = bucket_bytes
        self._from_here = {
            after
            for before, after in schedule.handovers().items()
            if schedule.rank_of(before.stage) == schedule.rank_of(after.stage)
        }
        self._activations = self._transfers = self._gradients = 0
        self._ran: set[tuple[int, str]] = set()
        self._leaving: dict[int, deque[tuple[int, int]]] = defaultdict(deque)
        self._arriving: dict[Instruction, tuple[int, int]] = {}
        self._num_forwards: Counter[int] = Counter()
        self._most = Moment(0, 0, 0, "begin")

    @property
    def left_bytes(self) -> int:
        """What is there beside gradients of parameters, when all has run."""
        return self._activations

    def peak(self) -> Moment:
        """When most is taken, and how much; the gradients of earlier batches and what is always there do not count."""
        last = {inst.stage: inst for inst in self._schedule.orders[self._rank]}
        for number, step in enumerate(p2p_program(self._schedule)[self._rank]):
            if isinstance(step, Instruction):
                self._compute(step)
                if last[step.stage] == step:
                    self._note(f"exchange of gradients of stage {step.stage}", gradients=self._bucket_bytes(step.stage))
            elif isinstance(step, Receive):
                self._arriving[step.transfer.consumer] = number, step.transfer.source
                self._transfers += self._received_bytes(step.transfer.consumer)
            elif isinstance(step, Send):
                # what a forward sends is kept for the backward anyway
                sent = self._costs[step.transfer.producer.stage].input_gradient_bytes
                is_gradient = step.transfer.producer.type is not InstructionType.FORWARD
                self._leaving[step.transfer.destination].append((number, sent if is_gradient else 0))
        return self._most

    def _compute(self, inst: Instruction) -> None:
        costs = self._costs[inst.stage]
        if inst in self._arriving:
            number, peer = self._arriving.pop(inst)
            while self._leaving[peer] and self._leaving[peer][0][0] <= number:
                self._transfers -= self._leaving[peer].popleft()[1]
        part = "weights" if inst.type in OF_WEIGHTS else inst.type.name
        is_first = (inst.stage, part) not in self._ran
        self._ran.add((inst.stage, part))
        cost = (costs.first if is_first else costs.again)[inst.type]
        if inst.type is InstructionType.FORWARD:
            self._num_forwards[inst.stage] += 1
            if self._num_forwards[inst.stage] == self._schedule.num_microbatches:
                cost = costs.last_forward or cost
        self._note(str(inst), activations=cost.peak_bytes)
        received = self._received_bytes(inst)
        self._activations += cost.kept_bytes + received  # it is part of the microbatch now, or gone
        self._transfers -= received
        if inst.type is InstructionType.FORWARD:
            if inst in self._from_here:  # it is what the stage before has sent, and counted there
                self._activations -= received
                self._transfers += received
            return
        if inst.type in _OF_GRADIENTS:
            self._transfers += costs.input_gradient_bytes
        if inst.type in OF_WEIGHTS:
            if Instruction(inst.stage, InstructionType.FORWARD, inst.microbatch) in self._from_here:
                self._activations += costs.input_bytes
            if is_first:
                self._activations -= costs.left_bytes
                self._gradients += costs.left_bytes

    def _received_bytes(self, inst: Instruction) -> int:
        costs = self._costs[inst.stage]
        if inst.type is InstructionType.FORWARD:
            return costs.input_bytes
        return costs.output_gradient_bytes if inst.type in _OF_GRADIENTS else 0

    def _note(self, what: str, *, activations: int = 0, gradients: int = 0) -> None:
        moment = Moment(self._activations + activations, self._transfers, self._gradients + gradients, what)
        if moment.total_bytes > self._most.total_bytes:
            self._most = moment
