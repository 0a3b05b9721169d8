"""Sends and receives of one rank: posted without waiting, and finished when it is known that nobody waits for long.

Shapes are known from the trace, so a receive gets its tensors when it is posted. Where a shape depends on values, the
sender tells it first, host to host, and the receive is posted late, when its tensors are needed. What comes after it
from the same rank stands in line until then, since transfers between two ranks keep their order. The peer of a late
receive cannot know when it is posted until something comes back that was computed afterwards; so long it keeps what it
has sent. Gradients have the shapes of what was sent, which this rank knows.

gloo transfers host memory only: tensors of a GPU go by way of it, and the host waits for the GPU before each send. That
is for trying out, as several ranks on one GPU, which nccl refuses.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.p2p import Transfer
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.strategy.engine.channels import Channels
from lightning_pfo.strategy.engine.stage import Stage, Tensors
from lightning_pfo.strategy.parallel.groups import global_rank, start_receive, start_send

_SHAPES = 2
"""Tells messages of shapes from others between the same hosts."""
_MOST_DIMS = 64
"""Torch has no tensors of more dimensions."""


@dataclass
class _Posted:
    """A transfer that is under way, or that is to be posted.

    Attributes:
        number: Which of this rank's postings it belongs to.
        transfer: What is transferred.
        tensors: What is sent, or where it is received.
        works: What to wait for.
        arrived: The tensors that are received into in place of `tensors`, or those themselves.
        shapes: Of a receive whose shapes the sender tells: these, and what to wait for.
        is_posted: Whether it is under way.
        is_late: Of a send, whether its receive may be posted late.
    """

    number: int
    transfer: Transfer
    tensors: Tensors = ()
    works: Sequence[dist.Work] = ()
    arrived: Tensors = ()
    shapes: tuple[torch.Tensor, dist.Work] | None = None
    is_posted: bool = True
    is_late: bool = False

    def wait(self) -> Tensors:
        for work in self.works:
            work.wait()
        for tensor, host in zip(self.tensors, self.arrived, strict=False):
            if host is not tensor:
                tensor.detach().copy_(host)
        return self.tensors


def goes_by_host(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> bool:
    """Whether the group's backend cannot transfer this tensor from or into the memory where it is."""
    return not tensor.is_cpu and dist.get_backend(group) == "gloo"


def _on_host(tensor: torch.Tensor, holds_data: bool) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", requires_grad=False)
    return host.copy_(tensor.detach()) if holds_data else host


class Transfers:
    """The transfers of one rank in an iteration.

    Args:
        schedule: What every rank executes.
        stages: The stages of this rank by index.
        group: Process group of the pipeline; None is the world.
        channels: Groups for transfers in one direction.
        hosts: The group of the pipeline's hosts.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        stages: Mapping[int, Stage],
        group: dist.ProcessGroup | None,
        channels: Channels,
        hosts: dist.ProcessGroup | None,
    ) -> None:
        self._stages = stages
        self._group = group
        self._channels = channels
        self._hosts = hosts
        self._places = {inst: place for order in schedule.orders for place, inst in enumerate(order)}
        self._arriving: dict[Instruction, _Posted] = {}
        self._in_line: dict[int, deque[_Posted]] = defaultdict(deque)
        self._leaving: dict[int, deque[_Posted]] = defaultdict(deque)
        self._received_late: set[int] = set()

    def send(self, number: int, transfer: Transfer, tensors: Tensors) -> None:
        """Send what an instruction has computed.

        Args:
            number: Number of the posting.
            transfer: What is transferred.
            tensors: The tensors.
        """
        peer = transfer.destination
        sent = self._transferable(tensors, holds_data=True)
        told: Tensors = ()
        works: list[Any] = []
        if shapes := self._stages[transfer.producer.stage].varying_sent(transfer.producer, tensors):
            self._received_late.add(peer)
            rows = [[len(shape), *shape, *[0] * (_MOST_DIMS - len(shape))] for shape in shapes]
            told = (torch.tensor(rows),)
            works.append(start_send(told[0], self._hosts, peer, _SHAPES))
        works += self._start(transfer, sent, is_send=True)
        is_late = peer in self._received_late
        self._leaving[peer].append(_Posted(number, transfer, (*sent, *told), works, is_late=is_late))

    def receive(self, number: int, transfer: Transfer) -> None:
        """Receive what an instruction needs.

        Args:
            number: Number of the posting.
            transfer: What is transferred.
        """
        posted = _Posted(number, transfer, is_posted=False)
        self._arriving[transfer.consumer] = posted
        if count := self._stages[transfer.consumer.stage].varying_received(transfer.consumer):
            told = torch.empty(count, 1 + _MOST_DIMS, dtype=torch.int64)
            posted.shapes = told, start_receive(told, self._hosts, transfer.source, _SHAPES)
        line = self._in_line[transfer.source]
        if posted.shapes is None and not line:
            self._begin(posted)
        else:
            line.append(posted)

    def wait_for(self, instruction: Instruction) -> Tensors | None:
        """What an instruction needs, when it is there; None if nothing is received for it."""
        posted = self._arriving.pop(instruction, None)
        if posted is None:
            return None
        peer = posted.transfer.source
        while not posted.is_posted:
            self._begin(self._in_line[peer].popleft())
        received = posted.wait()
        # the peer has posted its ends of what this rank sent it before, so this does not block for long
        self._finish_sends(peer, posted)
        return received

    def finish(self) -> None:
        """Wait for all sends."""
        for peer in self._leaving:
            self._finish_sends(peer, None)

    def forget(self) -> None:
        """Drop everything, which an exception may have left."""
        self._arriving.clear()
        self._in_line.clear()
        self._leaving.clear()
        self._received_late.clear()

    def _begin(self, posted: _Posted) -> None:
        """Post a receive."""
        transfer = posted.transfer
        shapes: list[list[int]] = []
        if posted.shapes is not None:
            told, work = posted.shapes
            work.wait()
            shapes = [row[1 : 1 + row[0]] for row in told.tolist()]
        posted.tensors = self._stages[transfer.consumer.stage].make_buffers(transfer.consumer, shapes)
        posted.arrived = self._transferable(posted.tensors, holds_data=False)
        posted.works = self._start(transfer, posted.arrived, is_send=False)
        posted.is_posted = True

    def _start(self, transfer: Transfer, tensors: Tensors, *, is_send: bool) -> list[Any]:
        peer = transfer.destination if is_send else transfer.source
        channel = self._channels.get((transfer.source, transfer.destination))
        tensors = tuple(tensor for tensor in tensors if tensor.numel())  # of nothing both know
        if channel is None:
            start = start_send if is_send else start_receive
            return [start(tensor, self._group, peer) for tensor in tensors]
        # all at once: in a queue they would be many kernels
        peer_in_world = global_rank(self._group, peer)
        how = dist.isend if is_send else dist.irecv
        operations = [dist.P2POp(how, tensor, peer_in_world, channel) for tensor in tensors]
        return dist.batch_isend_irecv(operations) if operations else []

    def _transferable(self, tensors: Tensors, *, holds_data: bool) -> Tensors:
        """The tensors, or in place of those that go by the host others there, with their data if they hold any."""
        return tuple(
            _on_host(tensor, holds_data) if goes_by_host(tensor, self._group) else tensor for tensor in tensors
        )

    def _finish_sends(self, peer: int, heard: _Posted | None) -> None:
        """Wait for sends to `peer` of which it is known, from what was heard of it, that it has posted its ends.

        Args:
            peer: The rank.
            heard: A receive from it; None: the iteration ends.
        """
        sends = self._leaving[peer]
        while sends and (heard is None or self._is_awaited(sends[0], heard)):
            sends.popleft().wait()

    def _is_awaited(self, send: _Posted, heard: _Posted) -> bool:
        if send.is_late and self._places[send.transfer.consumer] > self._places[heard.transfer.producer]:
            return False
        return send.number <= heard.number
