"""The profiling state machine: lock a clock, let it settle, measure some iterations, go on to the next lower clock.

::

    clock    1410 ....................  1350 ....................  1290 ...
    state    settle  measure  measure | settle  measure  measure | settle
                                      ^ all ranks exchange what they measured; the first writes the profile

A scan needs clock control: where any rank cannot set its clock, it stops on all of them. Whether the clock was really
there is measured too, and flagged where it was not (`core.flags`).

The GPU gets warmer meanwhile. So the highest clock is measured again after every few clocks, and at the end (a
*visit*), and what has drifted is taken out (`drift`). While it settles there, clocks are changed to and fro, to see how
long that takes: the `switch_latency` of the profile.

An iteration that takes a multiple of the time between two ticks of an energy counter would show the same in each tick.
So there are pauses of up to a tick between iterations.

Where the energies are more uncertain than wanted (`target_error`), all ranks measure more iterations at that clock.

An instruction whose energy has risen `patience` times in a row is past its energy valley and is measured no more. The
scan ends when that holds for every instruction of every stage, or there are no lower clocks.

Replicas of the pipeline, and the processes that share layers, measure GPUs of their own, all at the same clock at a
time: where they wait for each other, the slowest decides. An instruction's valley is that of their mean energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, cycle, islice
from typing import TypeVar

from lightning_pfo.core.energy_valley import EnergyValley
from lightning_pfo.core.errors import ClockPermissionError, DeviceError, PfoError
from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource
from lightning_pfo.device import ClockController
from lightning_pfo.listeners.agreement import first_problem
from lightning_pfo.listeners.drift import without_drift
from lightning_pfo.listeners.meters.instructions import InstructionMeter, Kind
from lightning_pfo.listeners.meters.rows import measured_rows
from lightning_pfo.listeners.meters.transfers import measured_transfers
from lightning_pfo.listeners.profile_row import ProfileRow
from lightning_pfo.planner.profile.switch_latency import summarised

_CLOCK_TIMEOUT_S = 30.0  # drivers of busy nodes take seconds now and then
_VISIT_AFTER = 6
"""So many clocks the highest one is measured again."""

_MOST_GROWTH = 2.0  # standard errors of few iterations are themselves uncertain


T = TypeVar("T")


class _MeasuringError(DeviceError):
    """What was to be measured cannot be."""


class FrequencyScan(InstructionListener):
    """Scans clocks during training; all ranks move to the next clock together.

    Args:
        source: The pipeline rank.
        clocks: Sets this rank's clock.
        clocks_mhz: Clocks to scan, highest first.
        meter: Measures instructions; a listener of its own, registered after this one, so that it is nested inside.
        iterations_per_clock: Iterations measured at each clock, at least.
        max_iterations_per_clock: At most so many, where energies are more uncertain than `target_error`.
        target_error: How uncertain energies may be: two relative standard errors.
        warmup_iterations: Iterations to let a clock settle.
        patience: Rises of energy in a row that end the scan of an instruction.
        gpu_name: Name of this rank's GPU, for the rows.
        on_clock_done: Called on every rank after each clock with all rows so far.
        is_ready: Scanning waits until this returns true.
        failure: Why this rank sets no clocks, if it does not.
        request_later: Asks for a clock when the device gets there, to see how long changes take; None: they are not
            tried out.
        pause: Called before each iteration that is measured, to let a little time pass.

    Attributes:
        position: How many clocks were measured.
        done: Whether there is nothing more to measure; the same on every rank.
        error: What has ended the scan early, on whichever rank; the same on every rank.
    """

    def __init__(
        self,
        source: InstructionSource,
        clocks: ClockController,
        clocks_mhz: Sequence[int],
        meter: InstructionMeter,
        *,
        iterations_per_clock: int,
        max_iterations_per_clock: int,
        target_error: float,
        warmup_iterations: int,
        patience: int,
        gpu_name: str,
        on_clock_done: Callable[[list[ProfileRow]], None],
        is_ready: Callable[[], bool],
        failure: Callable[[], Exception | None] = lambda: None,
        request_later: Callable[[int], None] | None = None,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        self._source = source
        self._clocks = clocks
        self._clocks_mhz = tuple(clocks_mhz)
        self._meter = meter
        self._iterations_per_clock = iterations_per_clock
        self._max_iterations_per_clock = max_iterations_per_clock
        self._target_error = target_error
        self._num_wanted = iterations_per_clock
        self._warmup_iterations = warmup_iterations
        self._patience = patience
        self._gpu_name = gpu_name
        self._on_clock_done = on_clock_done
        self._is_ready = is_ready
        self._failure = failure
        self._request_later = request_later
        self._pause = pause
        self._valleys: dict[tuple[int, str], EnergyValley] = {}
        self._rows: list[ProfileRow] = []
        self._visits: list[ProfileRow] = []
        self._is_visit = False
        self._to_and_fro: Iterator[int] = iter(())
        self._num_iterations = 0
        self._running = False
        self.position = 0
        self.done = False
        self.error: PfoError | None = None
        self._unmeasured: DeviceError | None = None

    @property
    def clock_mhz(self) -> int:
        """The clock being measured on this rank; the highest in visits, and once this rank has scanned enough."""
        return self._clocks_mhz[0 if self._is_visit or self._exhausted() else self.position]

    @property
    def num_clocks(self) -> int:
        """How many clocks there are to scan at most."""
        return len(self._clocks_mhz)

    def _exhausted(self) -> bool:
        all_passed = bool(self._valleys) and all(valley.passed for valley in self._valleys.values())
        return all_passed or self.position >= len(self._clocks_mhz)

    def on_iteration_begin(self, iteration: int) -> None:
        """Set the clock before its first iteration."""
        self._running = not self.done and self._is_ready()
        if self._running and self._num_iterations == 0:
            self._clocks.request(self.clock_mhz)
            is_set = self._clocks.wait(_CLOCK_TIMEOUT_S)
            self._stop_if_any_failed(is_set)
            if self._is_visit and self._warmup_iterations:
                self._to_and_fro = self._changes()
        if self._running and self._num_iterations == self._warmup_iterations:
            self._meter.reset()
        if self._running and self._num_iterations >= self._warmup_iterations:
            self._pause()

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Change clocks to and fro where nothing is measured."""
        clock_mhz = next(self._to_and_fro, None)
        if clock_mhz is not None and self._running and self._request_later is not None:
            self._request_later(clock_mhz)

    def _changes(self) -> Iterator[int]:
        """All pairs of the highest, the lowest and a middle clock; the highest in the second half of the iteration."""
        assert self._source.schedule is not None  # an iteration has begun
        measured = self._clocks_mhz[: self.position]  # all of them, where another rank's GPU has more
        high, middle, low = measured[0], measured[len(measured) // 2], measured[-1]
        count = len(self._source.schedule.orders[self._source.rank]) // 2
        return chain(islice(cycle((low, middle, high, middle, low, high)), count), (high,))

    def on_iteration_end(self, iteration: int) -> None:
        """Count iterations; after the last one of a clock, exchange and move on."""
        if not self._running:
            return
        self._num_iterations += 1
        if self._num_iterations < self._warmup_iterations + self._num_wanted or self._wants_more():
            return
        if self._stop_if_any_failed():  # what was measured since then was so at other clocks
            return
        transfers_s = measured_transfers(self._source, self._meter)
        mine = (
            []
            if self._exhausted() and not self._is_visit
            else self._tried(partial(self._measure, transfers_s), list[ProfileRow]())
        )
        if self._stop_if_any_failed():
            return
        gathered = self._source.all_gather((mine, self._clocks.latencies_by_pair), everywhere=True)
        rows = [row for part, _ in gathered for row in part]
        if self._is_visit:
            self._visits.extend(rows)
        else:
            self.position += 1
            self._rows.extend(rows)
            self._look_for_valleys(rows)
        is_over = all(self._source.all_gather(self._exhausted(), everywhere=True))
        self.done = is_over and (self._is_visit or self.position == 1)
        self._is_visit = not self._is_visit and self.position > 1 and (is_over or self.position % _VISIT_AFTER == 0)
        self._num_iterations = 0
        self._num_wanted = 1 if self._is_visit else self._iterations_per_clock
        self._on_clock_done(self._finished([latencies_s for _, latencies_s in gathered]))

    def _finished(self, latencies_s: Sequence[Mapping[tuple[int, int], list[float]]]) -> list[ProfileRow]:
        """All rows, with what is known by now of drift and latencies."""
        by_pair: dict[tuple[int, int], list[float]] = {}
        for of_rank in latencies_s:
            for pair, some_s in of_rank.items():
                by_pair.setdefault(pair, []).extend(some_s)
        latency = summarised(by_pair)
        rows = without_drift(self._rows, self._visits, self._target_error)
        if latency is None:
            return rows
        cells = latency.cells({row.frequency for row in rows})
        return [replace(row, switch_latency=cells[row.frequency]) for row in rows]

    def _stop_if_any_failed(self, is_set: bool = True) -> bool:
        """End the scan on all ranks if one of them does not set its clock, or measure; a collective call."""
        failure = self._failure() or self._unmeasured
        own = failure if isinstance(failure, PfoError) else DeviceError(str(failure)) if failure is not None else None
        if own is None and not is_set:
            own = DeviceError(
                f"{self._gpu_name} did not take a clock of {self.clock_mhz} MHz within {_CLOCK_TIMEOUT_S:g} s."
            )
        found = first_problem(self._source, own)
        if found is None:
            return False
        where, problem = found
        kind = ClockPermissionError if isinstance(problem, ClockPermissionError) else DeviceError
        does = "measures energies" if isinstance(problem, _MeasuringError) else "sets clocks"
        self.error = kind(f"A frequency scan {does}, which {where} cannot: {problem}")
        self.done, self._running = True, False
        return True

    def _tried(self, function: Callable[[], T], otherwise: T) -> T:
        """What is measured; where the GPU has failed, others are told before anybody waits for it."""
        try:
            return function()
        except DeviceError as error:
            self._unmeasured = _MeasuringError(str(error))
            return otherwise

    def _look_for_valleys(self, rows: Sequence[ProfileRow]) -> None:
        energies_j: dict[tuple[int, str], list[float]] = {}
        for row in rows:
            if row.stage in self._source.stages:
                energies_j.setdefault((row.stage, row.instruction), []).append(row.energy)
        for key, of_ranks in energies_j.items():
            self._valleys.setdefault(key, EnergyValley(self._patience)).add(math.fsum(of_ranks) / len(of_ranks))

    def _wants_more(self) -> bool:
        """Whether the energies of any rank are too uncertain yet, and may become less so; a collective call."""
        if self._num_wanted >= self._max_iterations_per_clock:
            return False
        own = 0.0 if self._exhausted() and not self._is_visit else self._tried(self._meter.energy_error, 0.0)
        error = max(self._source.all_gather(own, everywhere=True))
        if error <= self._target_error:
            return False
        growth = min((error / self._target_error) ** 2, _MOST_GROWTH)
        self._num_wanted = min(math.ceil(growth * self._num_wanted), self._max_iterations_per_clock)
        return True

    def _measure(self, transfers_s: Mapping[Kind, float]) -> list[ProfileRow]:
        rows = measured_rows(
            self._source, self._meter, self.clock_mhz, self._gpu_name, transfers_s, target_error=self._target_error
        )
        return [row for row in rows if self._is_visit or not self._is_past_valley(row)]

    def _is_past_valley(self, row: ProfileRow) -> bool:
        valley = self._valleys.get((row.stage, row.instruction))
        return valley is not None and valley.passed
