"""How long a GPU takes to change its clock, from the request on: one number, or one for each pair of clocks.

A profile says it in a column `switch_latency` of the rows of the clock that is asked for: a number, in seconds, where
it makes no difference from which clock the GPU comes; else a latency for each clock before it that was seen, such as
`1410:0.0052 705:0.011`. Readers that do not know the column leave it out.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.ranges import CLOCK, LATENCY, items
from lightning_pfo.core.wording import shortened

SWITCH_COLUMN = "switch_latency"
"""Name in tables."""

_SAME_S, _SAME = 0.001, 0.15
"""Latencies of pairs that differ by less than a millisecond or 15 % are equal: clocks are read back no more exactly."""

_ENOUGH = 2
"""A pair differs if it was seen so often."""


@dataclass(frozen=True)
class SwitchLatency:
    """Time from a request until the clock changes.

    Attributes:
        usual_s: Where nothing more is known, s.
        pairs_s: The clock before (MHz), the clock asked for (MHz) and the latency (s) of the pairs that are known.
    """

    usual_s: float = 0.0
    pairs_s: tuple[tuple[int, int, float], ...] = ()

    def __post_init__(self) -> None:
        pairs_s = tuple(tuple(items("a pair of clocks", pair)) for pair in items("pairs_s", self.pairs_s))
        for pair in pairs_s:
            if len(pair) != 3 or not (CLOCK.allows(pair[0]) and CLOCK.allows(pair[1]) and LATENCY.allows(pair[2])):
                raise ConfigurationError(
                    "A pair of clocks has a latency: the clock before, the one asked for (MHz) and seconds, such as "
                    f"(1410, 1200, 0.005); got {shortened(pair)}."
                )
        object.__setattr__(self, "pairs_s", tuple(sorted(pairs_s, reverse=True)))
        if not LATENCY.allows(self.usual_s):
            raise ConfigurationError(f"A switch latency is {LATENCY}; got {shortened(self.usual_s)}.")

    def __bool__(self) -> bool:
        return self.longest_s > 0

    @cached_property
    def _by_pair(self) -> dict[tuple[int, int], float]:
        return {(before, after): latency_s for before, after, latency_s in self.pairs_s}

    @cached_property
    def _by_direction(self) -> dict[bool, float]:
        by_direction: dict[bool, list[float]] = defaultdict(list)
        for before, after, latency_s in self.pairs_s:
            by_direction[after > before].append(latency_s)
        return {rises: statistics.median(latencies_s) for rises, latencies_s in by_direction.items()}

    @cached_property
    def longest_s(self) -> float:
        """The longest of all, s."""
        return max([self.usual_s, *(latency_s for *_, latency_s in self.pairs_s)])

    def of(self, before_mhz: int, after_mhz: int) -> float:
        """Latency of one change, s: that of its pair, or of pairs in the same direction, or the usual one."""
        if not self.pairs_s:
            return self.usual_s
        known_s = self._by_pair.get((before_mhz, after_mhz))
        return known_s if known_s is not None else self._by_direction.get(after_mhz > before_mhz, self.usual_s)

    def cells(self, clocks_mhz: Iterable[int]) -> dict[int, str]:
        """What the rows of each clock say in a table."""
        usual = format(self.usual_s, ".6g")
        into: dict[int, list[str]] = defaultdict(list)
        for before, after, latency_s in self.pairs_s:
            into[after].append(f"{before}:{latency_s:.6g}")
        return {clock: " ".join(into[clock]) or usual for clock in clocks_mhz}


def as_switch_latency(latency: float | SwitchLatency) -> SwitchLatency:
    """A number is that of all pairs.

    Raises:
        ConfigurationError: If it is none of seconds, at least 0.
    """
    return latency if isinstance(latency, SwitchLatency) else SwitchLatency(latency)


def summarised(seen_s: Mapping[tuple[int, int], Sequence[float]]) -> SwitchLatency | None:
    """What was seen of changes of clocks: medians; pairs only where they differ. None if nothing was.

    Args:
        seen_s: Latencies (s) by the clock before and the one asked for, MHz.
    """
    everything = [latency_s for latencies_s in seen_s.values() for latency_s in latencies_s]
    if not everything:
        return None
    usual_s = statistics.median(everything)
    medians = {pair: statistics.median(some) for pair, some in seen_s.items() if some}
    differs = any(
        len(seen_s[pair]) >= _ENOUGH and abs(latency_s - usual_s) > max(_SAME_S, _SAME * usual_s)
        for pair, latency_s in medians.items()
    )
    return SwitchLatency(usual_s, tuple((*pair, latency_s) for pair, latency_s in medians.items()) if differs else ())


def switch_latency_of(cells: Iterable[tuple[int, str]]) -> SwitchLatency | None:
    """What the rows of a table say together: the median where they disagree; None if none says anything.

    Args:
        cells: The clock (MHz) and the cell of each row.

    Raises:
        ConfigurationError: If a cell is neither seconds nor such numbers after clocks.
    """
    usual_s: list[float] = []
    pairs_s: dict[tuple[int, int], list[float]] = defaultdict(list)
    for clock, cell in set(cells):
        for word in cell.split():
            before, _, number = word.rpartition(":")
            seconds = _number(cell, number)
            if before:
                pairs_s[_clock(cell, before), clock].append(seconds)
            else:
                usual_s.append(seconds)
    everything = usual_s + [latency_s for some in pairs_s.values() for latency_s in some]
    if not everything:
        return None
    pairs = tuple((*pair, statistics.median(some)) for pair, some in pairs_s.items())
    return SwitchLatency(statistics.median(usual_s or everything), pairs)


def _number(cell: str, text: str) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not LATENCY.allows(value):
        raise ConfigurationError(
            f"column {SWITCH_COLUMN!r} must be {LATENCY}, or one after each clock before, such as 1410:0.0052 "
            f"705:0.011; got {shortened(cell)}"
        )
    return value


def _clock(cell: str, text: str) -> int:
    if not (text.isdecimal() and CLOCK.allows(int(text))):
        raise ConfigurationError(f"column {SWITCH_COLUMN!r} names clocks in whole MHz; got {shortened(cell)}")
    return int(text)
