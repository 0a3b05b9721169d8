"""P2P blocking power: what the GPUs of a rank draw while they wait for a neighbour, at each clock.

It may be given as one number, as a number for each clock, as either of these for each stage, or as the file that
`lightning-pfo p2p-power json=true` writes; else it is what the profile has measured (column `p2p_blocking_power_w`).
Where it depends on the clock, long waits are worth a clock of their own, see `wait_clocks`.
"""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.profile.profile import Profile

BlockingPowerOption: TypeAlias = (
    float | Mapping[int, float] | Sequence[float | Mapping[int, float]] | str | os.PathLike[str] | None
)
"""Watts per GPU, watts by clock in MHz, one of these per stage, the path of a file, or None for the profile's own."""


@dataclass(frozen=True)
class BlockingPower:
    """Power of one rank's GPUs while they wait.

    Attributes:
        clocks_mhz: Clocks, the highest first; empty if the power is the same at every clock.
        powers_w: Power at each of them; a single one if it is the same everywhere.
    """

    clocks_mhz: tuple[int, ...]
    powers_w: tuple[float, ...]

    def __post_init__(self) -> None:
        clocks, powers = self.clocks_mhz, self.powers_w
        if len(powers) != max(len(clocks), 1) or list(clocks) != sorted(set(clocks), reverse=True):
            raise ConfigurationError(
                "A blocking power has one value for each of its clocks, listed from the highest to the lowest, or one "
                f"value and no clocks; got clocks {clocks} and powers {powers}."
            )
        if not all(math.isfinite(power) and power >= 0 for power in powers):
            raise ConfigurationError(
                f"p2p_blocking_power_w must be a finite power in watts, at least 0; got {list(powers)}."
            )

    @property
    def varies(self) -> bool:
        """Whether it depends on the clock."""
        return max(self.powers_w) > min(self.powers_w)

    @property
    def least_w(self) -> float:
        """Power at the clock of least power."""
        return min(self.powers_w)

    @property
    def least_clock_mhz(self) -> int | None:
        """The clock of least power, the highest of equals; None if all clocks are equal."""
        return self.clocks_mhz[self.powers_w.index(self.least_w)] if self.varies else None

    def at(self, clock_mhz: int) -> float:
        """Power at any clock: on the line between its measured neighbours, or that of the nearest one."""
        clocks, powers = self.clocks_mhz, self.powers_w
        row = bisect_left(clocks, -clock_mhz, key=lambda clock: -clock)
        if row >= len(clocks):
            return powers[-1]
        if row == 0 or clocks[row] == clock_mhz:
            return powers[row]
        share = (clock_mhz - clocks[row]) / (clocks[row - 1] - clocks[row])
        return share * powers[row - 1] + (1 - share) * powers[row]


def resolve_blocking(
    profile: Profile, schedule: PipelineSchedule, given: BlockingPowerOption
) -> tuple[BlockingPower, ...]:
    """Blocking power of each rank, all its GPUs together.

    Raises:
        ProfileError: If none is given and the profile has none.
        ConfigurationError: If what is given is not a power for each stage, or the file cannot be read.
    """
    num_stages = schedule.num_stages
    curves = _given_curves(given, num_stages, profile.gpus_per_stage)
    if not curves:
        each = [profile.p2p_blocking_powers_w(stage) for stage in range(num_stages)]
        if not all(each):
            raise ProfileError(
                "The profile does not say how much power a GPU takes while it waits for a neighbour (column "
                "p2p_blocking_power_w). Give it in watts, e.g. p2p_blocking_power_w=85; 84 W was measured on an A100 "
                "SXM, 70 W on an A40."
            )
        curves = [_curve(power, 1) for power in each]
    # The stages of one rank share its GPUs.
    return tuple(_mean([curves[stage] for stage in schedule.stages_of(rank)]) for rank in range(schedule.num_ranks))


def check_blocking_power(given: BlockingPowerOption, num_stages: int) -> None:
    """Check what `resolve_blocking` is given, before there is a profile.

    Raises:
        ConfigurationError: If it is not a power for each stage, or the file cannot be read.
    """
    _given_curves(given, num_stages, 1)


def _given_curves(given: BlockingPowerOption, num_stages: int, num_gpus: int) -> list[BlockingPower]:
    """The power of each stage; none where the profile is to say."""
    if given is None:
        return []
    if isinstance(given, (str, os.PathLike)):
        given = read_blocking_power(given)
    each: Sequence[Any] = given if isinstance(given, Sequence) else [given] * num_stages
    if len(each) != num_stages:
        raise ConfigurationError(
            f"p2p_blocking_power_w is one number or one per stage; got {len(each)} for {num_stages} stages."
        )
    return [_curve(power, num_gpus) for power in each]


def read_blocking_power(path: str | os.PathLike[str]) -> dict[int, float]:
    """Read what `lightning-pfo p2p-power json=true` has printed: watts by clock.

    Raises:
        ConfigurationError: If the file cannot be read or holds something else.
    """
    where = Path(path)
    try:
        rows = json.loads(where.read_text(encoding="utf-8"))["blocked"]
        powers = {int(row["clock_mhz"]): float(row["power_w"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ConfigurationError(
            f"p2p_blocking_power_w={str(path)!r} is neither a number nor a file that holds blocking powers "
            f"({type(error).__name__}: {error}). Write one with `lightning-pfo p2p-power json=true > {where.name}`."
        ) from error
    return powers


def _curve(power: Any, num_gpus: int) -> BlockingPower:
    """From watts per GPU, or watts per GPU by clock."""
    by_clock = power if isinstance(power, Mapping) else {0: power}
    try:
        watts = {int(clock): num_gpus * float(value) for clock, value in by_clock.items()}
    except (TypeError, ValueError, OverflowError):
        watts = {}
    if not watts or min(watts) < 0:
        raise ConfigurationError(
            "p2p_blocking_power_w must be a finite power in watts, at least 0, or one for each clock such as "
            f"{{1410: 85, 705: 66}}, with a blank after each colon; got {power!r}."
        )
    clocks = sorted(watts, reverse=True)
    return _reduced(clocks, [watts[clock] for clock in clocks])


def _mean(curves: Sequence[BlockingPower]) -> BlockingPower:
    clocks = sorted({clock for curve in curves for clock in curve.clocks_mhz}, reverse=True)
    return _reduced(clocks, [sum(curve.at(clock) for curve in curves) / len(curves) for clock in clocks or [0]])


def _reduced(clocks: Sequence[int], powers: Sequence[float]) -> BlockingPower:
    """The same without clocks where they make no difference."""
    return BlockingPower(tuple(clocks), tuple(powers)) if len(set(powers)) > 1 else BlockingPower((), (powers[0],))
