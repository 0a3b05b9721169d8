"""Transfers between ranks that a schedule implies, where to post them, and whether that can hang.

`p2p_program` gives each rank a row of computations, sends and receives. A send and its receive are posted at one point
of a common lock-step execution. All rendezvous then have one global order that every rank follows, so the first
unfinished one always is next on both sides: it cannot hang, even if sends block until they are received, and even if
both directions of a pair of ranks share one queue (as in an NCCL communicator). This is what the strategy executes.

A channel (source, destination) delivers in the order of its sends, so the program receives in that order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class Transfer:
    """An activation or gradient that one rank sends to another; its text form is `0F3->1F3`.

    Attributes:
        producer: The instruction that computes it.
        consumer: The instruction that needs it.
        source: Rank of the producer.
        destination: Rank of the consumer, another one.
    """

    producer: Instruction
    consumer: Instruction
    source: int
    destination: int

    def __str__(self) -> str:
        return f"{self.producer}->{self.consumer}"


@dataclass(frozen=True, slots=True)
class Send:
    """The source rank posts the send of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"send {self.transfer}"


@dataclass(frozen=True, slots=True)
class Receive:
    """The destination rank posts the receive of a transfer."""

    transfer: Transfer

    def __str__(self) -> str:
        return f"receive {self.transfer}"


Step: TypeAlias = Instruction | Send | Receive
Program: TypeAlias = tuple[tuple[Step, ...], ...]
"""One tuple of steps per rank, in the order of posting."""


def transfers(schedule: PipelineSchedule) -> tuple[Transfer, ...]:
    """All transfers between different ranks; neighbouring stages on one rank hand over locally."""
    found = []
    for before, after in schedule.handovers().items():
        source, destination = schedule.rank_of(before.stage), schedule.rank_of(after.stage)
        if source != destination:
            found.append(Transfer(before, after, source, destination))
    return tuple(found)


def p2p_program(schedule: PipelineSchedule) -> Program:
    """Place each send and its receive at the end of the lock-step round in which the producer runs.

    Raises:
        ConfigurationError: If the order itself deadlocks.
    """
    outgoing = {transfer.producer: transfer for transfer in transfers(schedule)}
    rows: list[list[Step]] = [[] for _ in schedule.orders]
    for computed in schedule.rounds():
        for inst in computed:
            rows[schedule.rank_of(inst.stage)].append(inst)
        for inst in computed:
            if inst in outgoing:
                transfer = outgoing[inst]
                rows[transfer.source].append(Send(transfer))
                rows[transfer.destination].append(Receive(transfer))
    return tuple(map(tuple, rows))


def find_deadlock(program: Sequence[Sequence[Step]], *, blocking_sends: bool) -> tuple[tuple[int, Step], ...]:
    """Run a program until nothing moves; return the (rank, step) that are stuck, none if all of it ran.

    A rank runs its steps in order. A receive waits for the first undelivered send of its channel and must match it;
    a computation needs its input received before.

    Args:
        program: Steps by rank.
        blocking_sends: If true, a send ends only when the destination is at the matching receive (rendezvous without
            any buffer); otherwise it ends at once.
    """
    sent_to = {step.transfer.consumer for row in program for step in row if isinstance(step, Send)}
    position = [0] * len(program)
    channels: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
    received: set[Instruction] = set()

    def current(rank: int) -> Step | None:
        return program[rank][position[rank]] if position[rank] < len(program[rank]) else None

    def advance(rank: int) -> bool:
        step = current(rank)
        if isinstance(step, Instruction):
            if step in sent_to and step not in received:
                return False
        elif isinstance(step, Receive):
            channel = channels[step.transfer.source, rank]
            if not channel or channel[0] != step.transfer:
                return False
            channel.popleft()
            received.add(step.transfer.consumer)
        elif isinstance(step, Send):
            transfer = step.transfer
            if blocking_sends and current(transfer.destination) != Receive(transfer):
                return False
            channels[rank, transfer.destination].append(transfer)
        else:
            return False
        position[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(len(program)):
            while advance(rank):
                moved = True
    return tuple((rank, step) for rank in range(len(program)) if (step := current(rank)) is not None)


def check_transfers(schedule: PipelineSchedule) -> None:
    """Check that the transfers of a schedule cannot hang, even if each send blocks until it is received.

    Raises:
        ConfigurationError: If they can; the grid is drawn with the instructions around the stuck transfers in brackets.
    """
    stuck = [step for _, step in find_deadlock(p2p_program(schedule), blocking_sends=True)]
    if stuck:
        marks = [step if isinstance(step, Instruction) else step.transfer.consumer for step in stuck]
        raise ConfigurationError(
            f"The transfers of schedule {schedule.name!r} deadlock at {'; '.join(map(str, stuck))}. Use another "
            f"schedule, such as 1f1b.\n{schedule.grid(*marks)}"
        )
