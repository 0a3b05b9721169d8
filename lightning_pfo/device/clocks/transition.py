"""How quickly a GPU follows clock requests, and whether it gets there: the clock is read back after each change.

::

    request   lock call   ~~~~ the old clock ~~~~~ | the new clock
    |---------------- latency ---------------------|
                               polls:       .  .  .    (none before most of the usual latency has passed)
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_pfo.core.wording import counted
from lightning_pfo.device.gpu import Gpu
from lightning_pfo.device.time import run, time_of

TIMEOUT_S = 0.25
"""A clock that has not landed by then is not reached."""

_POLL_S = 0.0005
_POLL_SHARE = 0.1  # of the time passed: the latency is known to a tenth, and a clock never reached costs few polls
_USUAL_SHARE = 0.9  # of the usual latency: before that a poll would see nothing
_MIN_OBSERVED = 5
_KEPT = 1000
_ALL_OF_FIRST = 200
_OF_MANY, _WATCHED = 128, 16  # in a row, so that the clock before is known

Pause = Callable[[float], Generator[float, None, bool]]
"""A process that sleeps for some seconds; returns whether to stop watching, as another change is to be made."""


@dataclass(frozen=True)
class Transition:
    """One change of a clock.

    Attributes:
        clock_mhz: The clock asked for.
        reached_mhz: The clock read last.
        latency_s: From the request until the GPU was seen at the clock; None if it was not seen there, or something
            held it below it before.
        limits: What held it below; see `Gpu.clock_limits`.
    """

    clock_mhz: int
    reached_mhz: int
    latency_s: float | None
    limits: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ClockStatistics:
    """What became of the clock changes of a run; `str` is a line for people.

    Attributes:
        num_changes: Changes that the driver accepted.
        num_observed: Those that were seen to land; the others were overtaken by the next change, or not reached.
        latency_s: Median time from the request until the clock was there, s; nan if none was observed.
        latency_p90_s: Time within which nine in ten were there, s; nan if none was observed.
        not_reached: How often each clock (MHz) was not reached.
        limits: What held those clocks down.
        failure: Why no more clocks are set, or none ever were; empty while all is well.
        num_overtaken: Changes that were watched, and not seen to land before the next one.
    """

    num_changes: int
    num_observed: int
    latency_s: float
    latency_p90_s: float
    not_reached: dict[int, int]
    limits: frozenset[str]
    failure: str = ""
    num_overtaken: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: without nan, and clocks as text."""
        seen = self.num_observed > 0
        return {
            "num_changes": self.num_changes,
            "latency_s": self.latency_s if seen else None,
            "latency_p90_s": self.latency_p90_s if seen else None,
            "not_reached": {str(clock_mhz): count for clock_mhz, count in self.not_reached.items()},
            "limits": sorted(self.limits),
            **({"num_overtaken": self.num_overtaken} if self.num_overtaken else {}),
            **({"failure": self.failure} if self.failure else {}),
        }

    def __str__(self) -> str:
        parts = [counted(self.num_changes, "clock change")]
        if self.num_observed:
            parts.append(
                f"reached after {1e3 * self.latency_s:.1f} ms (nine in ten: {1e3 * self.latency_p90_s:.1f} ms)"
            )
        if self.not_reached:
            clocks = ", ".join(
                f"{clock} MHz {counted(count, 'time')}" for clock, count in sorted(self.not_reached.items())
            )
            reason = f" ({', '.join(sorted(self.limits))})" if self.limits else ""
            parts.append(f"not reached: {clocks}{reason}")
        if self.num_overtaken > self.num_observed:  # the driver is slow, or ignores what it takes
            watched = self.num_overtaken + self.num_observed
            parts.append(f"{self.num_overtaken} of {watched} watched were not seen to land before the next one")
        if self.failure:
            parts.append("then clock control failed" if self.num_changes else "clock control failed")
        return "; ".join(parts)


class TransitionLog:
    """Watches the clock changes of one GPU: all at first, later an eighth, as each reading costs the driver and a core.

    One thread watches; any may read.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._now_s = time_of(gpu).now_s
        self._tolerance_mhz = _half_step(gpu.supported_clocks_mhz())
        self._latencies_s: deque[float] = deque(maxlen=_KEPT)
        self._pairs: deque[tuple[int, int, float]] = deque(maxlen=_KEPT)
        self._not_reached: Counter[int] = Counter()
        self._limits: set[str] = set()
        self._num_overtaken = 0
        self.usual_latency_s = 0.0  # the median, once a few changes were seen to land

    @property
    def by_pair(self) -> dict[tuple[int, int], list[float]]:
        """Latencies (s) of the changes seen to land, by the clock before and the one asked for (MHz)."""
        found: dict[tuple[int, int], list[float]] = {}
        for before, after, latency_s in tuple(self._pairs):
            found.setdefault((before, after), []).append(latency_s)
        return found

    def is_due(self, number: int) -> bool:
        """Whether a change is to be watched; they are numbered from 0."""
        return number < _ALL_OF_FIRST or number % _OF_MANY < _WATCHED

    def watch(
        self, clock_mhz: int, requested_s: float, pause: Pause, before_mhz: int | None = None
    ) -> Generator[float, None, Transition]:
        """Read the clock until it is there, and remember what was seen; a process.

        Args:
            clock_mhz: The clock that the driver was just told.
            requested_s: When it was asked for, by the GPU's time.
            pause: Sleeps, and says when to stop.
            before_mhz: The clock before, if it had landed.

        Raises:
            DeviceError: If the clock cannot be read.
        """
        transition = yield from watch_clock(
            self._gpu, clock_mhz, requested_s, pause, self._tolerance_mhz, _USUAL_SHARE * self.usual_latency_s
        )
        if transition.latency_s is not None:
            self._latencies_s.append(transition.latency_s)
            if len(self._latencies_s) >= _MIN_OBSERVED:
                self.usual_latency_s = statistics.median(self._latencies_s)
            if before_mhz is not None:
                self._pairs.append((before_mhz, clock_mhz, transition.latency_s))
        elif transition.limits or self._now_s() - requested_s >= TIMEOUT_S:
            self._not_reached[clock_mhz] += 1
            self._limits |= transition.limits
        else:  # nobody knows
            self._num_overtaken += 1
        return transition

    def statistics(self, num_changes: int) -> ClockStatistics:
        """Summarize what was seen of `num_changes` changes."""
        latencies_s = sorted(tuple(self._latencies_s))
        return ClockStatistics(
            num_changes=num_changes,
            num_observed=len(latencies_s),
            latency_s=statistics.median(latencies_s) if latencies_s else float("nan"),
            latency_p90_s=latencies_s[math.ceil(0.9 * len(latencies_s)) - 1] if latencies_s else float("nan"),
            not_reached=dict(self._not_reached),
            limits=frozenset(self._limits),
            num_overtaken=self._num_overtaken,
        )


def watch_clock(
    gpu: Gpu,
    clock_mhz: int,
    requested_s: float,
    pause: Pause,
    tolerance_mhz: float,
    first_look_s: float = 0.0,
) -> Generator[float, None, Transition]:
    """Read a GPU's clock until it is within `tolerance_mhz` of `clock_mhz`, `TIMEOUT_S` is over, or `pause` says stop.

    Raises:
        DeviceError: If the clock cannot be read.
    """
    now_s = time_of(gpu).now_s
    is_stopped = (yield from pause(first_look_s - (now_s() - requested_s))) if first_look_s else False
    held: frozenset[str] = frozenset()
    while True:
        reached_mhz = gpu.graphics_clock_mhz()
        passed_s = now_s() - requested_s
        if abs(reached_mhz - clock_mhz) <= tolerance_mhz:
            # Under a power limit it shows when the load ends that the clock has landed, not when it does.
            return Transition(clock_mhz, reached_mhz, None if held else passed_s, held)
        if reached_mhz < clock_mhz:
            held |= gpu.clock_limits()
        if is_stopped or passed_s >= TIMEOUT_S:
            return Transition(clock_mhz, reached_mhz, None, held | gpu.clock_limits())
        is_stopped = yield from pause(max(_POLL_S, _POLL_SHARE * passed_s))


def measure_latency(gpu: Gpu, clocks_mhz: Sequence[int]) -> ClockStatistics:
    """Set clocks one after the other, each until it has landed or `TIMEOUT_S` is over; restore afterwards.

    What is measured is the time until the driver *reads* the new clock, so the resolution of that reading is included.

    Raises:
        DeviceError: If a clock cannot be set or read.
    """
    log, time_source = TransitionLog(gpu), time_of(gpu)
    try:
        gpu.claim_clocks()  # starts the watchdog, which the first change would wait for
        for clock_mhz in clocks_mhz:
            requested_s = time_source.now_s()
            gpu.lock_graphics_clock(clock_mhz)
            run(time_source, log.watch(clock_mhz, requested_s, _pause))
    finally:
        gpu.restore()
    return log.statistics(len(clocks_mhz))


def _pause(duration_s: float) -> Generator[float, None, bool]:
    yield duration_s
    return False


def _half_step(supported_mhz: Sequence[int]) -> float:
    """Half the least distance of supported clocks: whatever is read nearer than that is the clock asked for."""
    return min((above - below for above, below in pairwise(supported_mhz)), default=2) / 2
