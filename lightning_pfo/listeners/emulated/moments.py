"""Moments that ranks tell each other, beside the transfers of the pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_pfo.core.events import InstructionSource


class Moments:
    """Sends moments to other processes of the job, 8 bytes each; processes are numbered as in the whole job.

    A message that is sent before the transfer it belongs to is there when that transfer is, so nobody waits for one.
    """

    def __init__(self, source: InstructionSource, num_processes: int) -> None:
        """Connect the hosts of all processes; a collective call."""
        self._is_alone = num_processes == 1
        self._group = None if self._is_alone else source.host_group(everywhere=True)
        self._leaving: list[tuple[dist.Work | None, torch.Tensor]] = []

    def send(self, moment_s: float, to: int, tag: int) -> None:
        """Send a moment; returns at once."""
        message = torch.tensor([moment_s], dtype=torch.float64)
        self._leaving.append((dist.isend(message, group=self._group, group_dst=to, tag=tag), message))

    def receive(self, sender: int, tag: int) -> float:
        """Receive a moment."""
        message = torch.empty(1, dtype=torch.float64)
        dist.recv(message, group=self._group, group_src=sender, tag=tag)
        return message.item()

    def latest(self, moment_s: float) -> float:
        """The latest moment of all processes; a collective call. What was sent before has been received by then."""
        if self._is_alone:
            return moment_s
        latest = torch.tensor([moment_s], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=self._group)
        for work, _ in self._leaving:
            if work is not None:
                work.wait()
        self._leaving.clear()
        return latest.item()
