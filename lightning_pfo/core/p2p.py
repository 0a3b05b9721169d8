"""Transfers between ranks that a schedule implies, where to post them, and whether that can hang.

Two programs for the same order, each a row of computations, sends and receives per rank:

- `p2p_program` posts a send and its receive at one point of a common lock-step execution. All rendezvous then have one
  global order that every rank follows, so the first unfinished one always is next on both sides: it cannot hang,
  even if sends block until they are received, and even if both directions of a pair of ranks share one queue (as in
  an NCCL communicator). Use this one on any backend.
- `lazy_program` receives right before an input is needed and sends right after it is computed. It keeps the fewest
  buffers and is live as long as sends do not wait for their receiver; with blocking sends even 1F1B hangs.

A channel (source, destination) delivers in the order of its sends, so both programs receive in that order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.pipeline_schedule import PipelineSchedule


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
    for before, after in schedule.dependencies():
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


def lazy_program(schedule: PipelineSchedule) -> Program:
    """Receive right before an input is needed, with whatever the channel delivers before it; send right after."""
    every = transfers(schedule)
    incoming = {transfer.consumer: transfer for transfer in every}
    outgoing = {transfer.producer: transfer for transfer in every}
    channels: dict[tuple[int, int], deque[Transfer]] = defaultdict(deque)
    for inst in schedule.instructions:  # rank by rank in execution order: each channel in the order of its sends
        if inst in outgoing:
            transfer = outgoing[inst]
            channels[transfer.source, transfer.destination].append(transfer)
    rows = []
    for order in schedule.orders:
        row: list[Step] = []
        received: set[Transfer] = set()
        for inst in order:
            needed = incoming.get(inst)
            while needed is not None and needed not in received:
                arriving = channels[needed.source, needed.destination].popleft()
                received.add(arriving)
                row.append(Receive(arriving))
            row.append(inst)
            if inst in outgoing:
                row.append(Send(outgoing[inst]))
        rows.append(tuple(row))
    return tuple(rows)


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


def live_with_blocking_sends(schedule: PipelineSchedule) -> bool:
    """Whether `lazy_program` runs even if every send blocks until it is received: no buffer is needed anywhere."""
    return not find_deadlock(lazy_program(schedule), blocking_sends=True)


def peak_received(program: Sequence[Sequence[Step]]) -> tuple[int, ...]:
    """Largest number of transfers that each rank has posted receives for and not yet consumed: its receive buffers."""
    peaks = []
    for row in program:
        waiting: set[Instruction] = set()
        peak = 0
        for step in row:
            if isinstance(step, Receive):
                waiting.add(step.transfer.consumer)
                peak = max(peak, len(waiting))
            elif isinstance(step, Instruction):
                waiting.discard(step)
        peaks.append(peak)
    return tuple(peaks)
