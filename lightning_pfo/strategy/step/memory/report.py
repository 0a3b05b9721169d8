"""How much memory each rank takes in training, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pfo.strategy.model.partition import in_bytes


@dataclass(frozen=True)
class RankMemory:
    """The memory of tensors on one rank's device when an iteration, with states of optimizers, takes most of it.

    The parts add up to the peak. What other libraries than cuBLAS take, and what fragments leave unused, comes on top.

    Attributes:
        parameter_bytes: Parameters and buffers.
        gathered_bytes: Whole weights of layers that are divided over replicas.
        gradient_bytes: Gradients.
        optimizer_bytes: States of optimizers; None: not known before their first step.
        activation_bytes: What microbatches in flight keep, and what runs at that moment makes.
        transfer_bytes: What is received from, or sent to, other ranks.
        batch_bytes: The batch.
        moment: When that is: an instruction such as `0F3`, or `optimizer step`.
        is_exact: Whether it was found by running a microbatch; else activations are those that the trace of the step
            has shown, without what instructions make while they run.
        workspace_bytes: What cuBLAS keeps to work with.
        measured_bytes: The most that was there in iterations; None where nobody measures, as on a CPU.
    """

    parameter_bytes: int
    gathered_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    activation_bytes: int
    transfer_bytes: int
    batch_bytes: int
    moment: str
    is_exact: bool = True
    workspace_bytes: int = 0
    measured_bytes: int | None = None

    @property
    def peak_bytes(self) -> int:
        """All of it."""
        return sum(part or 0 for _, part in self.parts)

    @property
    def parts(self) -> list[tuple[str, int | None]]:
        """What it is made of, with names."""
        return [
            ("parameters", self.parameter_bytes),
            ("gathered", self.gathered_bytes),
            ("gradients", self.gradient_bytes),
            ("optimizer", self.optimizer_bytes),
            ("activations", self.activation_bytes),
            ("transfers", self.transfer_bytes),
            ("batch", self.batch_bytes),
            ("workspaces", self.workspace_bytes),
        ]


@dataclass(frozen=True)
class MemoryReport:
    """The memory of all ranks, in their order; of replicas one after the other.

    Attributes:
        ranks: What each takes.
    """

    ranks: tuple[RankMemory, ...]

    def with_measured(self, measured_bytes: Sequence[int | None]) -> MemoryReport:
        """The same with what was measured on each rank."""
        pairs = zip(self.ranks, measured_bytes, strict=True)
        return MemoryReport(tuple(replace(rank, measured_bytes=measured) for rank, measured in pairs))

    def __str__(self) -> str:
        shown = [name for name, _ in self.ranks[0].parts if any(dict(rank.parts)[name] != 0 for rank in self.ranks)]
        is_measured = any(rank.measured_bytes is not None for rank in self.ranks)
        rows = [["rank", *shown, "= peak", *(["measured"] if is_measured else []), "at"]]
        for index, rank in enumerate(self.ranks):
            parts = dict(rank.parts)
            row = [str(index), *("?" if parts[name] is None else in_bytes(parts[name] or 0) for name in shown)]
            about = "" if rank.is_exact and rank.optimizer_bytes is not None else ">= "
            row.append(about + in_bytes(rank.peak_bytes))
            if is_measured:
                row.append("" if rank.measured_bytes is None else in_bytes(rank.measured_bytes))
            rows.append([*row, rank.moment])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(["memory when most of it is taken:", *(f"  {line}" for line in lines)])
