"""A profiling run on any training loop: what `EnergyProfilerCallback` does, without a Trainer."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.files import PatientFiles, check_can_write, new_folder_for_earlier
from lightning_pfo.core.ranges import check_between
from lightning_pfo.core.wording import counted
from lightning_pfo.device import Gpu, GpuConfig
from lightning_pfo.device.time import time_of
from lightning_pfo.listeners.agreement import check_together, is_first
from lightning_pfo.listeners.frequency_scan import FrequencyScan
from lightning_pfo.listeners.gpu_session import (
    DEFAULT_CLUSTER,
    ClusterChoice,
    GpuChoice,
    open_session,
    ranks_on_this_node,
)
from lightning_pfo.listeners.meters.instructions import InstructionMeter
from lightning_pfo.listeners.profile_row import ProfileRow, profile_records
from lightning_pfo.planner.profile.profile_csv import write_profile

log = logging.getLogger(__name__)

_MOST_REPETITIONS = 10
_LONGEST_PAUSE_S = 0.2


@dataclass(frozen=True)
class ScanSettings:
    """Which clocks are measured, and for how long.

    Attributes:
        clock_step_mhz: Scan clocks at least this far apart, MHz; None: as `scan_step_mhz` of the GPU's
            configuration says, else every supported clock.
        min_clock_mhz: Do not go below this clock, MHz; None: `scan_min_mhz` of the GPU's configuration, else as far as
            needed.
        iterations_per_clock: Iterations measured at each clock, at least.
        max_iterations_per_clock: At most so many; None: ten times `iterations_per_clock`.
        target_error: Where the energy counter ticks, measure until two standard errors of each energy are below this
            share of it: 0.02 is 2 %. Energies that stay above are flagged `energy_uncertain`.
        warmup_iterations: Iterations before that, in which the clock settles.
        patience: Rises of energy in a row after which an instruction is measured no more.

    Raises:
        ConfigurationError: If a number is out of range.
    """

    clock_step_mhz: int | None = None
    min_clock_mhz: int | None = None
    iterations_per_clock: int = 3
    warmup_iterations: int = 1
    patience: int = 5
    max_iterations_per_clock: int | None = None
    target_error: float = 0.02

    def __post_init__(self) -> None:
        for name, value, least in (
            ("clock_step_mhz", self.clock_step_mhz, 1),
            ("min_clock_mhz", self.min_clock_mhz, 1),
            ("iterations_per_clock", self.iterations_per_clock, 1),
            ("warmup_iterations", self.warmup_iterations, 0),
            ("patience", self.patience, 1),
            ("max_iterations_per_clock", self.max_iterations_per_clock, self.iterations_per_clock),
        ):
            if value is not None:
                check_between(name, value, least)
        if not 0 < self.target_error < math.inf:
            raise ConfigurationError(
                f"target_error is a share of the energy above 0, such as 0.02 for 2 %; got {self.target_error}."
            )

    @property
    def max_iterations(self) -> int:
        """Iterations measured at a clock at most."""
        return self.max_iterations_per_clock or _MOST_REPETITIONS * self.iterations_per_clock


def clocks_to_scan(settings: ScanSettings, gpu: Gpu, config: GpuConfig) -> tuple[int, ...]:
    """The clocks that a scan measures, the highest first, each at least a step below the one before.

    Args:
        settings: What the scan was asked for.
        gpu: The GPU.
        config: What its configuration says where `settings` say nothing.

    Raises:
        ConfigurationError: If none is left.
    """
    supported = gpu.supported_clocks_mhz()
    lowest = settings.min_clock_mhz or config.scan_min_mhz or min(supported)
    highest = config.scan_max_mhz or max(supported)
    step = settings.clock_step_mhz or config.scan_step_mhz
    chosen: list[int] = []
    for clock in supported:
        if lowest <= clock <= highest and (not chosen or chosen[-1] - clock >= step):
            chosen.append(clock)
    if not chosen:
        raise ConfigurationError(
            f"Clocks from {lowest} MHz (min_clock_mhz, or scan_min_mhz of the GPU) to {highest} MHz (its scan_max_mhz) "
            f"are scanned, but {gpu.name} supports {min(supported)} to {max(supported)} MHz, so none is left. Use "
            f"min_clock_mhz={min(supported)}, and leave scan_max_mhz out."
        )
    return tuple(chosen)


class ProfilingRun:
    """Scans clocks while a pipeline trains, and writes the profile; `close` it, or use it as a context manager.

    Where any rank cannot set its clocks, the scan is over on all of them: `done`, with the reason as `error`.

    Args:
        source: The pipeline rank, e.g. `PipelinedModel.instruction_source`.
        output: The CSV file to write; the first process replaces it, whole, after each clock. That of an earlier run
            is moved into `earlier/1`, `earlier/2`, ... beside it.
        settings: Which clocks are measured, and for how long.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected: a name of conf/cluster such as `nvlink` or `ideal`, or a
            `ClusterConfig`.
        num_gpus: How many ranks of this node open a GPU; None: as torchrun says, else all ranks.
        user: Who is named in messages; None is this object.
        report: Told about progress.

    Raises:
        ConfigurationError: If no clock is left to scan, the file cannot be written, or something else sets this GPU's
            clocks.
        DeviceError: If the GPU cannot be opened.

    Example::

        with ProfilingRun(model.instruction_source, "profile.csv") as profiling:
            while not profiling.done:
                train_one_batch()
    """

    def __init__(
        self,
        source: InstructionSource,
        output: str | os.PathLike[str],
        *,
        settings: ScanSettings | None = None,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        num_gpus: int | None = None,
        user: object = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        settings = settings or ScanSettings()
        self.output = Path(output)
        self._source = source
        self._report = report
        self._user = self if user is None else user
        self._num_rows = 0
        self._has_written, self._files = False, PatientFiles()
        self._chance = random.Random(0)
        num_gpus = ranks_on_this_node(source) if num_gpus is None else num_gpus
        self._session = session = open_session(source, gpu, self._user, num_gpus=num_gpus, cluster=cluster)
        self.is_open = True
        self._meter = InstructionMeter(session.gpu, source)
        try:
            check_together(source, self._check_output)
            session.own_clocks(self._user, is_quiet=True)
            self._scan = self._make_scan(clocks_to_scan(settings, session.gpu, session.config), settings)
        except BaseException:
            session.release(self._user)
            raise
        source.add_listener(self._scan)
        source.add_listener(self._meter)
        per_clock = str(settings.warmup_iterations + settings.iterations_per_clock)
        if not session.gpu.energy_is_continuous:
            per_clock += f" to {settings.warmup_iterations + settings.max_iterations}"
        report(
            f"scanning up to {counted(self._scan.num_clocks, 'clock')} from {self._scan.clock_mhz} MHz down on "
            f"{session.gpu.name}, {per_clock} iterations each."
        )

    def _make_scan(self, clocks_mhz: Sequence[int], settings: ScanSettings) -> FrequencyScan:
        session = self._session
        return FrequencyScan(
            self._source,
            session.clocks,
            clocks_mhz,
            self._meter,
            iterations_per_clock=settings.iterations_per_clock,
            max_iterations_per_clock=settings.max_iterations,
            target_error=settings.target_error,
            warmup_iterations=settings.warmup_iterations,
            patience=settings.patience,
            gpu_name=session.gpu.name,
            on_clock_done=self._write,
            is_ready=lambda: session.ready,
            failure=lambda: session.clocks.error,
            pause=self._pause,
            request_later=lambda mhz: session.follower.when_reached(partial(session.clocks.request, mhz)),
        )

    @property
    def done(self) -> bool:
        """Whether the scan is finished, or has ended early; the same on every rank."""
        return self._scan.done

    @property
    def is_written(self) -> bool:
        """Whether what was measured is in the file, as far as this rank knows: the first one writes it."""
        return self._files.are_written

    @property
    def error(self) -> PfoError | None:
        """What has ended the scan early, on whichever rank; the same on every rank."""
        return self._scan.error

    @property
    def scan(self) -> FrequencyScan:
        """The listener that scans."""
        return self._scan

    @property
    def _writes(self) -> bool:
        return is_first(self._source)

    def _pause(self) -> None:
        """Let up to a tick of the counter pass; all others wait for the first rank."""
        if self._writes and self._meter.tick_s:
            time_of(self._session.gpu).sleep(self._chance.uniform(0, min(self._meter.tick_s, _LONGEST_PAUSE_S)))

    def _check_output(self) -> None:
        if self._writes:
            check_can_write("output", self.output)

    def _write(self, rows: list[ProfileRow]) -> None:
        if self._writes:
            self._files.write(self.output, partial(self._write_file, rows))
        if len(rows) == self._num_rows:  # a clock was visited again
            return
        self._num_rows = len(rows)
        latest = min(row.frequency for row in rows)
        measured = [row for row in rows if row.frequency == latest]
        mean_energy = math.fsum(row.energy for row in measured) / len(measured)
        self._report(f"{latest} MHz measured: {counted(len(measured), 'instruction')}, mean {mean_energy:.3g} J.")

    def _write_file(self, rows: Sequence[ProfileRow]) -> None:
        if not self._has_written and self.output.exists():
            place = new_folder_for_earlier(self.output.parent)
            self.output.rename(place / self.output.name)
            log.warning("The profile of an earlier run was moved to %s.", place / self.output.name)
        write_profile(self.output, profile_records(rows))
        self._has_written = True

    def close(self) -> None:
        """Stop listening and restore the clocks; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        for listener in (self._meter, self._scan):
            self._source.remove_listener(listener)
        self._meter.close()
        self._files.try_again()
        if self.error is not None and self._writes:
            count = self._scan.position
            kept = f"the profile holds the {counted(count, 'clock')} before" if count else "it writes no profile"
            log.warning("%s The scan has stopped on all ranks; %s. Training goes on without it.", self.error, kept)
        statistics = self._session.clocks.statistics()
        if statistics.num_changes:
            self._report(f"{self._session.gpu.name}: {statistics}.")
        self._session.release(self._user)

    def __enter__(self) -> ProfilingRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
