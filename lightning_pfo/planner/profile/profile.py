"""Instruction profiles: time and energy of each stage's instructions at each clock. Files: `profile_csv`."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lightning_pfo.core.errors import ProfileError
from lightning_pfo.core.instruction import InstructionType


@dataclass(frozen=True)
class InstructionProfile:
    """Measurements of one kind of instruction on one stage, one entry per clock, the highest clock first.

    Attributes:
        clocks_mhz: Locked graphics clocks, strictly decreasing.
        times_s: Time of one microbatch.
        energies_j: Energy of one microbatch, all GPUs of the stage together.
        p2p_blocking_powers_w: Power of the stage's GPUs while blocked at each clock; empty where not measured.
        time_stderrs_s: Standard error of each time; empty where not known.
        energy_stderrs_j: Standard error of each energy; empty where not known.
    """

    clocks_mhz: tuple[int, ...]
    times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    p2p_blocking_powers_w: tuple[float, ...] = ()
    time_stderrs_s: tuple[float, ...] = ()
    energy_stderrs_j: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        clocks = self.clocks_mhz
        if not clocks or any(a <= b for a, b in pairwise(clocks)):
            raise ProfileError(f"Clocks are listed from the highest to the lowest, each once; got {clocks}.")
        columns = (self.times_s, self.energies_j)
        optional = (self.p2p_blocking_powers_w, self.time_stderrs_s, self.energy_stderrs_j)
        if any(len(c) != len(clocks) for c in columns) or any(len(c) not in (0, len(clocks)) for c in optional):
            raise ProfileError(
                f"Each of {len(clocks)} clocks needs one time and one energy; got "
                f"{[len(column) for column in (*columns, *optional)]} values of times, energies, blocking powers and "
                "standard errors of times and energies."
            )
        if not all(0 < time < math.inf for time in self.times_s):
            raise ProfileError(f"Times must be positive and finite numbers of seconds; got {min(self.times_s)}.")

    def at(self, clock_mhz: int) -> tuple[float, float]:
        """Time (s) and energy (J) at a measured clock.

        Raises:
            ProfileError: If this clock was not measured.
        """
        try:
            row = self.clocks_mhz.index(clock_mhz)
        except ValueError:
            raise ProfileError(
                f"A plan may use measured clocks only; {clock_mhz} MHz is not among "
                f"{', '.join(map(str, self.clocks_mhz))} MHz."
            ) from None
        return self.times_s[row], self.energies_j[row]

    def near(self, clock_mhz: int) -> tuple[float, float]:
        """Time (s) and energy (J) at any clock: on the line between its measured neighbours, or at the nearest one."""
        clocks, row = self.clocks_mhz, bisect_left(self.clocks_mhz, -clock_mhz, key=operator.neg)
        if row == len(clocks):
            return self.times_s[-1], self.energies_j[-1]
        if row == 0 or clocks[row] == clock_mhz:
            return self.times_s[row], self.energies_j[row]
        share = (clock_mhz - clocks[row]) / (clocks[row - 1] - clocks[row])
        time_s, energy_j = (
            share * values[row - 1] + (1 - share) * values[row] for values in (self.times_s, self.energies_j)
        )
        return time_s, energy_j


@dataclass(frozen=True)
class Profile:
    """Measurements of all instructions of a pipeline.

    Attributes:
        instructions: Measurements by stage and kind of instruction.
        gpus_per_stage: GPUs that work on each stage (more than one where rank columns say so).
        gpus: Names of the GPUs that were measured, each once; empty where not known.
    """

    instructions: Mapping[tuple[int, InstructionType], InstructionProfile]
    gpus_per_stage: int = 1
    gpus: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus_per_stage < 1:
            raise ProfileError(f"At least one GPU works on a stage; got gpus_per_stage={self.gpus_per_stage}.")

    @property
    def device(self) -> str:
        """What was measured, for headings; empty where not known."""
        return " and ".join(self.gpus)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(stage for stage, _ in self.instructions)

    def of(self, stage: int, kind: InstructionType) -> InstructionProfile:
        """Measurements of one kind of instruction.

        Raises:
            ProfileError: If there are none.
        """
        try:
            return self.instructions[stage, kind]
        except KeyError:
            present = ", ".join(sorted(f"{s} {k.profile_name}" for s, k in self.instructions))
            raise ProfileError(
                f"The schedule runs {kind.profile_name} on stage {stage}, but the profile only has: {present}. "
                "Profile with the schedule that you plan for."
            ) from None

    def top_clock_mhz(self, stage: int) -> int:
        """The highest clock that was measured for every instruction of `stage`.

        Raises:
            ProfileError: If there is none.
        """
        clocks_of = {kind: p.clocks_mhz for (s, kind), p in self.instructions.items() if s == stage}
        common = set.intersection(*map(set, clocks_of.values()))
        if not common:
            ranges = ", ".join(f"{k.profile_name} at {c[-1]} to {c[0]} MHz" for k, c in clocks_of.items())
            raise ProfileError(
                f"The instructions of a stage need a clock at which all of them were measured, to compare with; stage "
                f"{stage} has {ranges}, none in common. Profile all instructions at the top clock."
            )
        return max(common)

    def p2p_blocking_powers_w(self, stage: int) -> dict[int, float]:
        """Measured power of the stage's GPUs while blocked in watts, by clock in MHz; empty where not measured."""
        by_clock: dict[int, list[float]] = {}
        for (s, _), measured in self.instructions.items():
            if s == stage and measured.p2p_blocking_powers_w:
                for clock, power in zip(measured.clocks_mhz, measured.p2p_blocking_powers_w, strict=True):
                    by_clock.setdefault(clock, []).append(power)
        return {clock: sum(powers) / len(powers) for clock, powers in sorted(by_clock.items(), reverse=True)}
