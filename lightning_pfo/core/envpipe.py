"""EnvPipe's rules (Choi et al., USENIX ATC 2023) that hold before and during training alike.

The *outer envelope* of a pipeline is the first forward on every stage, everything on the last stage, and the backward
of the last microbatch on every stage: filling, the last stage's steady state, draining. *Reconfiguration* raises
clocks on the critical path, step by step, until the path keeps to the envelope or is at the top.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.instruction import Instruction, InstructionType

RECONFIGURATIONS = ("default", "greedy", "balanced")
"""`default` leaves a plan as it is."""

_GREEDY_STEPS = 3
"""Greedy raises one clock where balanced raises many, so it takes larger steps."""


def is_outer(inst: Instruction, num_stages: int, num_microbatches: int) -> bool:
    """Whether an instruction is part of the outer envelope."""
    edge = 0 if inst.type is InstructionType.FORWARD else num_microbatches - 1
    return inst.stage == num_stages - 1 or inst.microbatch == edge


def clocks_to_raise(
    path: Sequence[int], clocks_mhz: Sequence[int], tops_mhz: Sequence[int], outer: Sequence[bool], how: str
) -> tuple[list[int], int]:
    """Whose clocks a reconfiguration raises next, and by how many steps; nobody's if it has ended.

    Args:
        path: Numbers of the instructions of the critical path, last to first.
        clocks_mhz: Clock of each instruction.
        tops_mhz: The highest it may have.
        outer: Whether it is part of the envelope.
        how: `greedy` (the latest of the path below the top) or `balanced` (all of the path at its lowest clock).
    """
    below = [node for node in path if clocks_mhz[node] < tops_mhz[node]]
    if not below or all(outer[node] for node in path):
        return [], 0
    if how == "greedy":
        return below[:1], _GREEDY_STEPS
    lowest = min(clocks_mhz[node] for node in below)
    return [node for node in below if clocks_mhz[node] == lowest], 1
