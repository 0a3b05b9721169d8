"""Measures time and energy of every iteration, all ranks together."""

from __future__ import annotations

import contextlib
import math
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from lightning_pfo.core.events import InstructionListener, InstructionSource
from lightning_pfo.device import Gpu
from lightning_pfo.device.energy.reader import EnergyReader
from lightning_pfo.device.time import time_of
from lightning_pfo.listeners.device_follower import DeviceFollower
from lightning_pfo.listeners.meters.ticks import mean_energies
from lightning_pfo.planner.adaptive.windows import MeanEnergy

_LOOK_EVERY_S = 0.1
_KEPT_ITERATIONS = 10_000
_BEFORE_S = 0.5  # some ticks, so that the first moment lies between two

Key = TypeVar("Key")
_Own = tuple[int, float, float, "float | None"]
"""Of one GPU: number of the iteration, s, J, degrees Celsius."""


@dataclass(frozen=True)
class IterationMeasurement:
    """What one iteration took, all ranks together.

    Attributes:
        iteration: Number of the iteration.
        time_s: From the begin of the iteration on the first rank until all ranks had finished.
        energy_j: Energy of all GPUs in that time.
        temperature_c: The hottest GPU's at the end, degrees Celsius; None where a GPU does not tell.
    """

    iteration: int
    time_s: float
    energy_j: float
    temperature_c: float | None = None


class IterationMeter(InstructionListener):
    """Measures every iteration; `take` aggregates over ranks.

    Attributes:
        remarks: What ranks have said with the last `take`, this one included.

    Args:
        gpu: This rank's GPU.
        source: The pipeline rank.
        follower: Knows when the device begins and ends an iteration; the host never waits for it.
        is_ready: Iterations that begin before this returns true are not measured.
    """

    def __init__(
        self, gpu: Gpu, source: InstructionSource, follower: DeviceFollower, is_ready: Callable[[], bool]
    ) -> None:
        self._source = source
        self._follower = follower
        self._time = time_of(gpu)
        self._reader = EnergyReader(gpu)
        self._temperature_c: Callable[[], float | None] = getattr(gpu, "temperature_c", lambda: None)
        self._is_ready = is_ready
        self.remarks: list[str] = []
        self._is_measuring = False
        self._num_launched = 0  # iterations not taken yet
        self._begin = (0.0, 0.0)
        self._finished: queue.SimpleQueue[_Own] = queue.SimpleQueue()
        self._intervals_s: deque[tuple[int, float, float]] = deque(maxlen=_KEPT_ITERATIONS)

    @property
    def tick_s(self) -> float:
        """How often this rank's energy counter advances, s; 0: all the time. See `EnergyReader.tick_s`."""
        return self._reader.tick_s

    def mean_energies(self, group_of: Callable[[int], Key | None]) -> dict[Key, MeanEnergy]:
        """Mean energy that this rank's GPU used in the iterations of each group.

        More exact than single iterations, which begin and end between ticks. Empty where the counter does not tick:
        there they are exact.

        Args:
            group_of: The group of an iteration, by its number; None for those that nobody asks about.
        """
        groups: dict[Key, list[tuple[float, float]]] = {}
        for iteration, begin_s, end_s in self._intervals_s:
            group = group_of(iteration)
            if group is not None:
                groups.setdefault(group, []).append((begin_s, end_s))
        if not groups:
            return {}
        trace = self._reader.trace(min(intervals[0][0] for intervals in groups.values()) - _BEFORE_S)
        return {} if trace is None else mean_energies(trace, groups)

    def close(self) -> None:
        """Stop reading the GPU."""
        self._reader.close()

    def on_iteration_begin(self, iteration: int) -> None:
        """Read clock and counter."""
        self._is_measuring = self._is_ready()
        if self._is_measuring:
            self._follower.when_reached(self._reached_begin)

    def on_iteration_end(self, iteration: int) -> None:
        """Read them again."""
        if self._is_measuring:
            self._num_launched += 1
            self._follower.when_reached(partial(self._reached_end, iteration))

    def _reached_begin(self) -> None:
        self._begin = self._read()

    def _reached_end(self, iteration: int) -> None:
        time_s, energy_j = self._read()
        self._intervals_s.append((iteration, self._begin[0], time_s))
        self._finished.put((iteration, time_s - self._begin[0], energy_j - self._begin[1], self._temperature_c()))

    def _read(self) -> tuple[float, float]:
        return self._time.now_s(), self._reader.energy_j()

    def take(self, remark: str = "", *, waits: bool = False) -> IterationMeasurement | None:
        """Return the last iteration's measurement, the same on every rank; a collective call.

        Each rank's `remark` reaches all others with it, as `remarks`.

        On CUDA it is the iteration before the last one: the device is still busy with the last, unless one `waits`.

        The first rank's time counts, of replicas that of the slowest: it runs the first and the last instruction, and
        the clocks of several nodes cannot be compared. The energy is that of all GPUs.
        """
        gathered = self._source.all_gather((self._source.rank, self._take_own(waits), remark), everywhere=True)
        self.remarks = [remark for *_, remark in gathered if remark]
        if any(own is None for _, own, _ in gathered):
            return None
        temperatures_c = [own[3] for _, own, _ in gathered]
        return IterationMeasurement(
            gathered[0][1][0],
            max(own[1] for rank, own, _ in gathered if rank == 0),
            math.fsum(own[2] for _, own, _ in gathered),
            None if None in temperatures_c else max(temperatures_c),
        )

    def _take_own(self, waits: bool) -> _Own | None:
        own = None
        while self._num_launched > (self._follower.is_deferred and not waits):
            self._num_launched -= 1
            own = self._next_finished()
        return own

    def _next_finished(self) -> _Own | None:
        """Wait for the device, however long an iteration takes; None if nothing follows it any more."""
        while True:
            is_last_look = self._follower.has_ended
            with contextlib.suppress(queue.Empty):
                return self._finished.get(timeout=0 if is_last_look else _LOOK_EVERY_S)
            if is_last_look:
                return None
