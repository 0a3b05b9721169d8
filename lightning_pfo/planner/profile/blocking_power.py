"""P2P blocking power: what the GPUs of a rank draw while they wait for a neighbour, at each clock.

It may be given as one number, as a number for each clock, as either of these for each stage, or as the file that
`lightning-pfo p2p-power json=true` writes; else it is what the profile has measured (column `p2p_blocking_power_w`).
Where it depends on the clock, long waits are worth a clock of their own, see `wait_clocks`.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from lightning_pfo.core.errors import ConfigurationError, ProfileError
from lightning_pfo.core.ranges import CLOCK, POWER
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import cut, listed, shortened
from lightning_pfo.planner.profile.interpolation import at_clock
from lightning_pfo.planner.profile.profile import Profile

BlockingPowerOption: TypeAlias = (
    float | Mapping[int, float] | Sequence[float | Mapping[int, float]] | str | os.PathLike[str] | None
)
"""Watts per GPU, watts by clock in MHz, one of these per stage, the path of a file, or None for the profile's own."""

_NO_NUMBERS = ("nan", "inf", "-inf")  # as text, and no names of files
_RULE = (
    f"p2p_blocking_power_w must be {POWER}, or one for each clock such as {{1410: 85, 705: 66}} (whole MHz above 0), "
    "with a blank after each colon"
)


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
        for name, quantity in (("clocks_mhz", CLOCK), ("powers_w", POWER)):
            object.__setattr__(self, name, quantity.column(name, getattr(self, name)))
        clocks, powers = self.clocks_mhz, self.powers_w
        if len(powers) != max(len(clocks), 1) or list(clocks) != sorted(set(clocks), reverse=True):
            raise ConfigurationError(
                "A blocking power has one value for each of its clocks, listed from the highest to the lowest, or one "
                f"value and no clocks; got clocks {shortened(clocks)} and powers {shortened(powers)}."
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
        if not self.clocks_mhz:
            return self.powers_w[0]
        (power_w,) = at_clock(clock_mhz, self.clocks_mhz, self.powers_w)
        return power_w


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
    is_one = isinstance(given, Mapping) or not isinstance(given, Sequence) or isinstance(given, (bytes, bytearray))
    each: Sequence[Any] = [given] * num_stages if is_one else given  # type: ignore[list-item, assignment]
    if len(each) != num_stages:
        raise ConfigurationError(
            f"p2p_blocking_power_w is one number or one per stage; got {len(each)} for {num_stages} stages."
        )
    return [_curve(power, num_gpus) for power in each]


def read_blocking_power(path: str | os.PathLike[str]) -> dict[int, float]:
    """Read what `lightning-pfo p2p-power json=true` has printed: watts by clock.

    Raises:
        ConfigurationError: If the file cannot be read or holds something else, or a clock twice.
    """
    name = cut(str(path))
    if name.lower() in _NO_NUMBERS:
        raise ConfigurationError(f"{_RULE}; got {name}.")
    how = f"Write one with `lightning-pfo p2p-power json=true > {cut(Path(path).name)}`."
    try:
        rows = json.loads(Path(path).read_text(encoding="utf-8-sig"))["blocked"]
        pairs = [(row["clock_mhz"], row["power_w"]) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {cut(str(error))}"
        raise ConfigurationError(
            f"p2p_blocking_power_w={name!r} is neither a number nor a file that holds blocking powers ({reason}). {how}"
        ) from error
    try:
        powers = _by_clock(pairs)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error} {how}") from None
    repeated = [clock for clock, count in Counter(clock for clock, _ in pairs).items() if count > 1]
    if repeated:
        raise ConfigurationError(f"{name}: each clock has one power; more than one at {listed(repeated)} MHz. {how}")
    return powers


def _curve(power: Any, num_gpus: int) -> BlockingPower:
    """From watts per GPU, or watts per GPU by clock."""
    if isinstance(power, Mapping):
        watts = _by_clock(power.items())
        clocks = sorted(watts, reverse=True)
        return _reduced(clocks, [num_gpus * watts[clock] for clock in clocks])
    if not POWER.allows(power):
        raise ConfigurationError(f"{_RULE}; got {shortened(power)}.")
    return BlockingPower((), (num_gpus * float(power),))


def _by_clock(pairs: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    """Watts by clock, at least one.

    Raises:
        ConfigurationError: If there is none, a clock is no whole number of MHz, or a power no number of watts.
    """
    watts: dict[int, float] = {}
    for clock, power in pairs:
        if not CLOCK.allows(clock) or not POWER.allows(power):
            raise ConfigurationError(f"{_RULE}; got {shortened(clock)}: {shortened(power)}.")
        watts[int(clock)] = float(power)
    if not watts:
        raise ConfigurationError(f"{_RULE}; got none.")
    return watts


def _mean(curves: Sequence[BlockingPower]) -> BlockingPower:
    clocks = sorted({clock for curve in curves for clock in curve.clocks_mhz}, reverse=True)
    return _reduced(clocks, [sum(curve.at(clock) for curve in curves) / len(curves) for clock in clocks or [0]])


def _reduced(clocks: Sequence[int], powers: Sequence[float]) -> BlockingPower:
    """The same without clocks where they make no difference."""
    return BlockingPower(tuple(clocks), tuple(powers)) if len(set(powers)) > 1 else BlockingPower((), (powers[0],))
