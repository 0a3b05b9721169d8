"""Instruction profiles: time and energy of each stage's instructions at each clock. Files: `profile_csv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.flags import CLOCK_NOT_REACHED
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import CLOCK, ENERGY, ERROR, POWER, TIME, TRANSFER, Quantity, check_whole, items
from lightning_pfo.core.wording import counted, listed, shortened
from lightning_pfo.planner.profile.interpolation import at_clock
from lightning_pfo.planner.profile.repetitions import mean_of
from lightning_pfo.planner.profile.switch_latency import SWITCH_COLUMN, SwitchLatency

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {
    "clocks_mhz": ("frequency", CLOCK),
    "times_s": ("time", TIME),
    "energies_j": ("energy", ENERGY),
    "p2p_blocking_powers_w": ("p2p_blocking_power_w", POWER),
    "time_stderrs_s": ("time_stderr", ERROR),
    "energy_stderrs_j": ("energy_stderr", ERROR),
}
"""What is measured of an instruction: its name in tables, and what its values may be. The first three are needed."""

TRANSFER_COLUMN = "transfer_time"
"""Name in tables of how long a result takes to another rank: in each row of an instruction, where known."""

STAGE = Quantity("a stage number 0, 1, ...", "", 0, 100_000, is_whole=True)
_MOST_GPUS = 1_000_000


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
        transfer_s: Time from the end of the instruction until the one on another rank that needs its output could have
            started; None where not known. It hardly depends on the clock, so that one number does for all.
        unreached_mhz: Those of `clocks_mhz` at which the GPU did not run when it was asked to; see `unreached`.
        capped_mhz: Groups of `clocks_mhz` that a power limit held at one lower clock, so that they are repetitions of
            one measurement: their times and energies are replaced by the means. (`read_profile` has done so, and tells
            none.)
    """

    clocks_mhz: tuple[int, ...]
    times_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    p2p_blocking_powers_w: tuple[float, ...] = ()
    time_stderrs_s: tuple[float, ...] = ()
    energy_stderrs_j: tuple[float, ...] = ()
    transfer_s: float | None = None
    unreached_mhz: tuple[int, ...] = ()
    capped_mhz: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        try:
            for name, (_, quantity) in COLUMNS.items():
                object.__setattr__(self, name, quantity.column(name, getattr(self, name)))
            if self.transfer_s is not None:
                object.__setattr__(self, "transfer_s", *TRANSFER.column("transfer_s", [self.transfer_s]))
        except ConfigurationError as error:
            raise ProfileError(str(error)) from None
        clocks = self.clocks_mhz
        if not clocks or any(a <= b for a, b in pairwise(clocks)):
            raise ProfileError(f"Clocks are listed from the highest to the lowest, each once; got {shortened(clocks)}.")
        lengths = {name: len(getattr(self, name)) for name in COLUMNS}
        needed, known = list(lengths.values())[:3], list(lengths.values())[3:]
        if {*needed} != {len(clocks)} or not {*known} <= {0, len(clocks)}:
            raise ProfileError(
                f"Each of {counted(len(clocks), 'clock')} needs one time and one energy, and a blocking power and "
                f"standard errors where these are known at all; got {lengths}."
            )
        object.__setattr__(self, "capped_mhz", tuple(map(tuple, self.capped_mhz)))
        for group in self.capped_mhz:
            self._merge(group)

    def _merge(self, group: Sequence[int]) -> None:
        if not group or not set(group) <= set(self.clocks_mhz):
            raise ProfileError(
                f"capped_mhz are groups of the measured clocks, such as [(1410, 1395)]; got {shortened(group)}, of "
                f"{shortened(self.clocks_mhz)}."
            )
        rows = [self.clocks_mhz.index(clock) for clock in group]
        for values_name, stderrs_name in (("times_s", "time_stderrs_s"), ("energies_j", "energy_stderrs_j")):
            values, stderrs = list(getattr(self, values_name)), list(getattr(self, stderrs_name))
            mean, stderr = mean_of([values[row] for row in rows], [stderrs[row] if stderrs else None for row in rows])
            for row in rows:
                values[row] = mean
                if stderrs:
                    stderrs[row] = stderr
            object.__setattr__(self, values_name, tuple(values))
            object.__setattr__(self, stderrs_name, tuple(stderrs))

    def at(self, clock_mhz: int) -> tuple[float, float]:
        """Time (s) and energy (J) at a measured clock.

        Raises:
            ProfileError: If this clock was not measured.
        """
        try:
            row = self.clocks_mhz.index(clock_mhz)
        except ValueError:
            raise ProfileError(
                f"A plan may use measured clocks only; {shortened(clock_mhz)} MHz is not among "
                f"{listed(self.clocks_mhz, 100)} MHz."
            ) from None
        return self.times_s[row], self.energies_j[row]

    def near(self, clock_mhz: int) -> tuple[float, float]:
        """Time (s) and energy (J) at any clock: on the line between its measured neighbours, or at the nearest one."""
        time_s, energy_j = at_clock(clock_mhz, self.clocks_mhz, self.times_s, self.energies_j)
        return time_s, energy_j


@dataclass(frozen=True)
class Profile:
    """Measurements of all instructions of a pipeline.

    Attributes:
        instructions: Measurements by stage and kind of instruction.
        gpus_per_stage: GPUs that work on each stage (more than one where rank columns say so).
        gpus: Names of the GPUs that were measured, each once; empty where not known.
        switch_latency: Time from a request until a clock changes; None where not known.
    """

    instructions: Mapping[tuple[int, InstructionType], InstructionProfile]
    gpus_per_stage: int = 1
    gpus: tuple[str, ...] = ()
    switch_latency: SwitchLatency | None = None

    def __post_init__(self) -> None:
        try:
            check_whole("gpus_per_stage", self.gpus_per_stage, 1, _MOST_GPUS)
            gpus = items("gpus", self.gpus)
        except ConfigurationError as error:
            raise ProfileError(str(error)) from None
        if not all(isinstance(name, str) for name in gpus):
            raise ProfileError(f"gpus are names; got {shortened(gpus)}.")
        object.__setattr__(self, "gpus", gpus)
        _check_instructions(self.instructions)

    @property
    def device(self) -> str:
        """What was measured, for headings; empty where not known."""
        return " and ".join(self.gpus)

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return 1 + max(stage for stage, _ in self.instructions)

    def to_frame(self) -> pd.DataFrame:
        """The measurements as a pandas table with the columns of a profile CSV; `read_profile` takes it back.

        Where several GPUs work on a stage, each has a row with its share of energy and power (column `rank`).
        """
        import pandas as pd  # slow to load, and nobody else needs it

        shares = {"energies_j": 1.0, "p2p_blocking_powers_w": 1.0, "energy_stderrs_j": 0.5}
        clocks = {clock for measured in self.instructions.values() for clock in measured.clocks_mhz}
        switch = {} if self.switch_latency is None else self.switch_latency.cells(clocks)
        rows = []
        for (stage, kind), measured in self.instructions.items():
            known = {
                column: [value / self.gpus_per_stage ** shares.get(name, 0) for value in getattr(measured, name)]
                for name, (column, _) in COLUMNS.items()
                if name != "clocks_mhz" and getattr(measured, name)
            }
            for clock, *values in zip(measured.clocks_mhz, *known.values(), strict=True):
                row: dict[str, Any] = {"stage": stage, "instruction": kind.profile_name, "frequency": clock}
                if clock in measured.unreached_mhz:
                    row["flags"] = CLOCK_NOT_REACHED
                if switch:
                    row[SWITCH_COLUMN] = switch[clock]
                transfer = {} if measured.transfer_s is None else {TRANSFER_COLUMN: measured.transfer_s}
                rows.append({**row, **dict(zip(known, values, strict=True)), **transfer})
        table = pd.DataFrame(rows)
        if self.gpus_per_stage > 1:
            table = pd.concat([table.assign(rank=rank) for rank in range(self.gpus_per_stage)], ignore_index=True)
        return table.assign(gpu=self.device) if self.device else table

    def of(self, stage: int, kind: InstructionType) -> InstructionProfile:
        """Measurements of one kind of instruction.

        Raises:
            ProfileError: If there are none.
        """
        try:
            return self.instructions[stage, kind]
        except KeyError:
            present = sorted(f"{s} {k.profile_name}" for s, k in self.instructions)
            raise ProfileError(
                f"The schedule runs {kind.profile_name} on stage {stage}, but the profile only has: {listed(present)}. "
                "Profile with the schedule that you plan for."
            ) from None

    def transfer_s(self, stage: int, kind: InstructionType) -> float:
        """Time in seconds that the output of an instruction takes to another rank; 0 where it is not known.

        Raises:
            ProfileError: If there are no measurements of the instruction.
        """
        return self.of(stage, kind).transfer_s or 0.0

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


def _check_instructions(instructions: Mapping[tuple[int, InstructionType], InstructionProfile]) -> None:
    """Check that there are measurements, and that stages are numbered without holes.

    Raises:
        ProfileError: If that is not so, or a key or a value has another type.
    """
    if not isinstance(instructions, Mapping) or not instructions:
        raise ProfileError(
            "A profile has measurements of at least one instruction, as in {(0, InstructionType.FORWARD): "
            f"InstructionProfile(...)}}; got {shortened(instructions)}."
        )
    for key, measured in instructions.items():
        if not (
            isinstance(key, tuple)
            and len(key) == 2
            and STAGE.allows(key[0])
            and isinstance(key[1], InstructionType)
            and isinstance(measured, InstructionProfile)
        ):
            raise ProfileError(
                "A profile maps stage and InstructionType to an InstructionProfile; got "
                f"{shortened(key)}: {shortened(measured)}."
            )
    stages = sorted({stage for stage, _ in instructions})
    if stages != list(range(len(stages))):
        missing = next(number for number, stage in enumerate(stages) if number != stage)
        raise ProfileError(
            f"Stages are numbered from 0 without holes; there is no stage {missing} among {listed(stages)}."
        )
