"""What instructions of a stage take of memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lightning_pfo.core.instruction import InstructionType

OF_WEIGHTS = (InstructionType.BACKWARD, InstructionType.WEIGHT_GRADIENT)
"""Instructions that end the backward of a microbatch."""


@dataclass(frozen=True)
class Cost:
    """What an instruction takes.

    Attributes:
        peak_bytes: The most beyond what is there before, while it runs.
        kept_bytes: What is there more when it has run; less, if negative.
    """

    peak_bytes: int
    kept_bytes: int


NO_COST = Cost(0, 0)


@dataclass(frozen=True)
class StageCosts:
    """What the instructions of a stage take.

    Attributes:
        input_bytes: Of what a forward receives from the stage before.
        input_gradient_bytes: Of the gradients that it is given for that.
        output_gradient_bytes: Of the gradients that a backward receives from the stage behind.
        first: Costs of instructions for the first microbatch, which leaves gradients behind.
        again: Costs for others.
        left_bytes: Of the gradients of parameters that a first microbatch leaves behind.
        last_forward: Of the forward of the last microbatch, where the step ends in it for the whole batch; None: it is
            like others.
    """

    input_bytes: int
    input_gradient_bytes: int
    output_gradient_bytes: int
    first: Mapping[InstructionType, Cost]
    again: Mapping[InstructionType, Cost]
    left_bytes: int = 0
    last_forward: Cost | None = None

    def leaving(self, left_bytes: int) -> StageCosts:
        """The same for so much left, which the first that ends a backward in another way would leave too."""
        first = dict(self.first)
        for kind, cost in self.again.items():
            more = left_bytes if kind in OF_WEIGHTS else 0
            first.setdefault(kind, Cost(cost.peak_bytes + more, cost.kept_bytes + more))
        return replace(self, first=first, left_bytes=left_bytes)
