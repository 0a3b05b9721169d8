"""One measurement, as a profile CSV has it: of one GPU at one clock."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_pfo.core.instruction import InstructionType


@dataclass(frozen=True)
class ProfileRow:
    """A checked line of the file; units are in the names, None is what the file does not tell."""

    line: int
    stage: int
    kind: InstructionType
    clock_mhz: int
    time_s: float
    energy_j: float
    blocking_w: float | None
    time_stderr_s: float | None
    energy_stderr_j: float | None
    transfer_s: float | None
    clock_seen_mhz: float | None
    flags: frozenset[str]
    rank: tuple[str, ...]
    gpu: str
    switch_latency: str
