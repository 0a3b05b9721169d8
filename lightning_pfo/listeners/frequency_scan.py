"""The profiling state machine: lock a clock, let it settle, measure some iterations, go on to the next lower clock.

::

    clock    1410 ....................  1350 ....................  1290 ...
    state    settle  measure  measure | settle  measure  measure | settle
                                      ^ all ranks exchange what they measured; the first writes the profile

A scan needs clock control: where any rank cannot set its clock, it stops on all of them. Whether the clock was really
there is measured too, and flagged where it was not (`core.flags`).

Where the energies are more uncertain than wanted (`target_error`), all ranks measure more iterations at that clock.

An instruction whose energy has risen `patience` times in a row is past its energy valley and is measured no more. The
scan ends when that holds for every instruction of every stage, or there are no lower clocks.

Replicas of the pipeline, and the processes that share layers, measure GPUs of their own, all at the same clock at a
time: where they wait for each other, the slowest decides. An instruction's valley is that of their mean energy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lightning_pfo.core.errors import ClockPermissionError, DeviceError, PfoError
from lightning_pfo.core.events import InstructionListener, InstructionSource
from lightning_pfo.core.flags import CLOCK_ABOVE, CLOCK_NOT_REACHED, ENERGY_UNCERTAIN
from lightning_pfo.device import ClockController
from lightning_pfo.listeners.agreement import first_problem
from lightning_pfo.listeners.meters.instructions import InstructionMeter, Kind, Measured
from lightning_pfo.listeners.meters.transfers import measured_transfers

_CLOCK_TIMEOUT_S = 30.0  # drivers of busy nodes take seconds now and then
_CLOCK_TOLERANCE = 0.01
_MOST_GROWTH = 2.0  # standard errors of few iterations are themselves uncertain


@dataclass(frozen=True)
class ProfileRow:
    """One line of the profile CSV; units as there: MHz, s and J per microbatch and GPU, W.

    `clock_seen_mhz` is the mean clock at which the GPU ran, nan where it does not tell. `transfer_time` is None where
    the instruction sends nothing, or nobody waited for it. The ranks of replicas and of
    tensor parallelism are columns only where there are several.
    """

    stage: int
    instruction: str
    frequency: int
    time: float
    energy: float
    time_stderr: float
    energy_stderr: float
    samples: int
    p2p_blocking_power_w: float
    transfer_time: float | None = None
    flags: str = ""
    clock_seen_mhz: float = math.nan
    gpu: str = ""
    dp_rank: int = 0
    tp_rank: int = 0


class EnergyValley:
    """Decides when an instruction has been scanned far enough."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._last_j = math.inf
        self._num_rises = 0

    @property
    def passed(self) -> bool:
        """Whether energy has risen `patience` times in a row."""
        return self._num_rises >= self._patience

    def add(self, energy_j: float) -> None:
        """Take the energy at the next lower clock."""
        self._num_rises = self._num_rises + 1 if energy_j > self._last_j else 0
        self._last_j = energy_j


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
        self._valleys: dict[tuple[int, str], EnergyValley] = {}
        self._rows: list[ProfileRow] = []
        self._num_iterations = 0
        self._running = False
        self.position = 0
        self.done = False
        self.error: PfoError | None = None

    @property
    def clock_mhz(self) -> int:
        """The clock being measured on this rank; the highest once this rank has scanned enough."""
        return self._clocks_mhz[self.position] if not self._exhausted() else self._clocks_mhz[0]

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
        if self._running and self._num_iterations == self._warmup_iterations:
            self._meter.reset()

    def on_iteration_end(self, iteration: int) -> None:
        """Count iterations; after the last one of a clock, exchange and move on."""
        if not self._running:
            return
        self._num_iterations += 1
        if self._num_iterations < self._warmup_iterations + self._num_wanted or self._wants_more():
            return
        self._num_iterations, self._num_wanted = 0, self._iterations_per_clock
        if self._stop_if_any_failed():  # what was measured since then was so at other clocks
            return
        transfers_s = measured_transfers(self._source, self._meter)
        mine = [] if self._exhausted() else self._measure(transfers_s)
        self.position += 1
        rows = [row for part in self._source.all_gather(mine, everywhere=True) for row in part]
        self._rows.extend(rows)
        self._look_for_valleys(rows)
        self.done = all(self._source.all_gather(self._exhausted(), everywhere=True))
        self._on_clock_done(self._rows)

    def _stop_if_any_failed(self, is_set: bool = True) -> bool:
        """End the scan on all ranks if one of them does not set its clock; a collective call."""
        failure = self._failure()
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
        self.error = kind(f"A frequency scan sets clocks, which {where} cannot: {problem}")
        self.done, self._running = True, False
        return True

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
        own = 0.0 if self._exhausted() else self._meter.energy_error()
        error = max(self._source.all_gather(own, everywhere=True))
        if error <= self._target_error:
            return False
        growth = min((error / self._target_error) ** 2, _MOST_GROWTH)
        self._num_wanted = min(math.ceil(growth * self._num_wanted), self._max_iterations_per_clock)
        return True

    def _measure(self, transfers_s: Mapping[Kind, float]) -> list[ProfileRow]:
        rows = []
        clock_mhz = self.clock_mhz
        dp_rank, tp_rank = self._source.place
        blocked_power_w = self._meter.blocked_power_w()
        for (stage, kind), measured in self._meter.measured().items():
            valley = self._valleys.get((stage, kind.profile_name))
            if valley is not None and valley.passed:
                continue
            rows.append(
                ProfileRow(
                    stage=stage,
                    instruction=kind.profile_name,
                    frequency=clock_mhz,
                    time=measured.time_s,
                    energy=measured.energy_j,
                    time_stderr=measured.time_stderr_s,
                    energy_stderr=measured.energy_stderr_j,
                    samples=measured.samples,
                    p2p_blocking_power_w=blocked_power_w,
                    transfer_time=transfers_s.get((stage, kind)),
                    flags=_flags(measured, clock_mhz, self._target_error),
                    clock_seen_mhz=round(measured.clock_mhz, 1),
                    gpu=self._gpu_name,
                    dp_rank=dp_rank,
                    tp_rank=tp_rank,
                )
            )
        return rows


def _flags(measured: Measured, clock_mhz: int, target_error: float) -> str:
    """What a reader should know; see `core.flags`."""
    flags = set(measured.limits)
    if measured.energy_error > target_error:
        flags.add(ENERGY_UNCERTAIN)
    if abs(measured.clock_mhz - clock_mhz) > _CLOCK_TOLERANCE * clock_mhz:
        flags.add(CLOCK_NOT_REACHED)
    if measured.clock_mhz > (1 + _CLOCK_TOLERANCE) * clock_mhz:
        flags.add(CLOCK_ABOVE)
    return " ".join(sorted(flags))
