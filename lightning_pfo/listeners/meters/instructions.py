"""Measures time and energy of every instruction, and the waiting in between."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.device import Gpu
from lightning_pfo.device.energy.attribution import MeanPower, mean_powers
from lightning_pfo.device.energy.sampler import EnergySampler, StateWithin, state_within
from lightning_pfo.device.time import time_of
from lightning_pfo.listeners.device_follower import DeviceMark, Recorder, no_mark, record_timed_mark

Kind = tuple[int, InstructionType]
"""Stage and type: what is averaged."""

_UNKNOWN = MeanPower(math.nan, math.nan)


class TooFewTicksError(DeviceError):
    """The energy counter has advanced too seldom to tell what used the energy."""


@dataclass
class Samples:
    """Repeated measurements of the same thing: when it began and ended (s), and its energy (J) where read directly."""

    intervals_s: list[tuple[float, float]] = field(default_factory=list)
    energies_j: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.intervals_s)

    @property
    def times_s(self) -> list[float]:
        """How long each took."""
        return [end_s - begin_s for begin_s, end_s in self.intervals_s]


@dataclass(frozen=True)
class Measured:
    """Mean time and energy of one instruction, with standard errors.

    Attributes:
        time_s: Mean time, s.
        time_stderr_s: Its standard error.
        energy_j: Mean energy, J.
        energy_stderr_j: Its standard error.
        samples: How often it was measured.
        seen: At which clock the GPU ran meanwhile, what held it down, how warm it was.
    """

    time_s: float
    time_stderr_s: float
    energy_j: float
    energy_stderr_j: float
    samples: int
    seen: StateWithin

    @property
    def energy_error(self) -> float:
        """How wrong the energy may be: two standard errors, relative; 19 of 20 energies are nearer to the truth."""
        return 2 * self.energy_stderr_j / self.energy_j if self.energy_j > 0 else math.inf


def mean_and_stderr(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error, without the highest and the lowest tenth of the values.

    A busy host delays single instructions by much; a trimmed mean does not follow them. With fewer than ten values none
    is left out. The standard error of a single value is 0.
    """
    num_trimmed = len(values) // 10
    values = sorted(values)[num_trimmed : len(values) - num_trimmed]
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return mean, 0.0
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


class InstructionMeter(InstructionListener):
    """Measures every instruction, and the waiting between instructions.

    A counter without ticks is read at begin and end of each. The counter of a real GPU advances every 20 to 100 ms,
    more slowly than instructions follow each other; a thread watches it, and energy is attributed to instructions by
    least squares over all ticks (`device.energy.attribution`). `close` ends that thread.

    On CUDA, begin and end are those on the GPU, of events in its stream: the host waits for it once per iteration only.

    Attributes:
        instructions: Samples by stage and kind.
        blocked: Samples of waiting for neighbours within an iteration.
    """

    tick_timeout_s = 1.0
    """So long it is waited for the tick that shows the energy of the last instruction."""

    def __init__(self, gpu: Gpu, source: InstructionSource, record: Recorder = record_timed_mark) -> None:
        self._gpu = gpu
        self._source = source
        self._time = time_of(gpu)
        self._reads_directly = gpu.energy_is_continuous
        self._record = no_mark if gpu.is_emulated else record
        self._sampler = EnergySampler(gpu, with_energy=not self._reads_directly)
        self.reset()

    @property
    def scope(self) -> str:
        """Whose moments can be compared with those of the samples; see `TimeSource.scope`."""
        return self._time.scope

    def reset(self) -> None:
        """Forget all samples."""
        self.instructions: dict[Kind, Samples] = defaultdict(Samples)
        self.blocked = Samples()
        self._since: tuple[float, float] | None = None
        self._anchor: tuple[DeviceMark, float] | None = None
        self._marks: list[tuple[DeviceMark, Samples]] = []
        self._from_s = self._time.now_s()
        self._known: tuple[tuple[float, int], dict[Kind | None, MeanPower]] = (-1.0, 0), {}

    def close(self) -> None:
        """Stop watching the GPU."""
        self._sampler.stop()

    @property
    def tick_s(self) -> float:
        """How often the energy counter advances, s; 0 where it does so all the time, or that is not known yet."""
        return 0.0 if self._reads_directly else self._sampler.tick_s

    def blocked_power(self) -> MeanPower:
        """Mean power while waiting, and its standard error; nan if there was no waiting."""
        if not self._reads_directly:
            return self._powers().get(None, _UNKNOWN)
        times_s, energies_j = self.blocked.times_s, self.blocked.energies_j
        waited_s = math.fsum(times_s)
        if waited_s <= 0:
            return _UNKNOWN
        power_w = math.fsum(energies_j) / waited_s
        squares = math.fsum((e - power_w * t) ** 2 for e, t in zip(energies_j, times_s, strict=True))
        return MeanPower(power_w, math.sqrt(squares * len(times_s) / max(len(times_s) - 1, 1)) / waited_s)

    def measured(self) -> dict[Kind, Measured]:
        """Mean time and energy by stage and kind, from all samples since `reset`.

        Raises:
            TooFewTicksError: If the GPU's energy counter did not advance meanwhile.
            DeviceError: If the GPU failed.
        """
        powers = {} if self._reads_directly else self._powers()
        states = self._sampler.states(self._from_s)
        measured: dict[Kind, Measured] = {}
        for kind, samples in self.instructions.items():
            time_s, time_stderr_s = mean_and_stderr(samples.times_s)
            if self._reads_directly:
                energy_j, energy_stderr_j = mean_and_stderr(samples.energies_j)
            else:
                power = powers[kind]
                energy_j = power.power_w * time_s
                energy_stderr_j = math.hypot(power.stderr_w * time_s, power.power_w * time_stderr_s)
            seen = state_within(states, samples.intervals_s)
            if math.isnan(seen.clock_mhz):  # too short to be met by a look: what was seen meanwhile has to do
                seen = state_within(states, [(self._from_s, math.inf)])
            measured[kind] = Measured(time_s, time_stderr_s, energy_j, energy_stderr_j, len(samples), seen)
        return measured

    def energy_error(self) -> float:
        """How wrong an energy since `reset` may be: the largest of two relative standard errors.

        That of waiting counts in relation to all that was used, as little of it matters little.

        0 where energy is read directly (what differs then is the host), inf where nothing can be told yet.

        Raises:
            DeviceError: If the GPU failed.
        """
        if self._reads_directly:
            return 0.0
        try:
            errors = [one.energy_error for one in self.measured().values()]
            return max([*errors, self.waiting_error()], default=0.0)
        except TooFewTicksError:
            return math.inf

    def waiting_error(self) -> float:
        """How wrong the energy of waiting may be: two standard errors, as a share of all that was used.

        Raises:
            TooFewTicksError: If the GPU's energy counter did not advance meanwhile.
            DeviceError: If the GPU failed.
        """
        waiting, waited_s = self.blocked_power(), math.fsum(self.blocked.times_s)
        if math.isnan(waiting.stderr_w):
            return 0.0
        computing_j = math.fsum(one.energy_j * one.samples for one in self.measured().values())
        used_j = waiting.power_w * waited_s + computing_j
        return 2 * waiting.stderr_w * waited_s / used_j if used_j > 0 else math.inf

    def _powers(self) -> dict[Kind | None, MeanPower]:
        """Mean power by kind, None being the waiting."""
        kinds = dict[Kind | None, Samples]([(None, self.blocked), *self.instructions.items()])
        last_s = max((samples.intervals_s[-1][1] for samples in kinds.values() if len(samples)), default=self._from_s)
        self._sampler.wait_for_reading_after(last_s, self.tick_timeout_s)
        trace = self._sampler.trace(self._from_s)
        known = last_s, len(trace.times_s)
        if known == self._known[0]:
            return self._known[1]
        powers = mean_powers(trace, {kind: samples.intervals_s for kind, samples in kinds.items()})
        missing = [kind for kind in self.instructions if kind not in powers]
        if missing:
            raise self._sampler.error or TooFewTicksError(
                f"Energy is attributed by the ticks of the GPU's energy counter; {self._gpu.name} had "
                f"{len(trace.times_s)} in {last_s - self._from_s:.3g} s, too few for {len(missing)} of "
                f"{len(self.instructions)} kinds of instructions. Measure for longer: more iterations_per_clock."
            )
        self._known = known, powers
        return powers

    def on_iteration_begin(self, iteration: int) -> None:
        """Waiting for the first instruction begins."""
        self._sampler.start()
        self._since = self._read()
        anchor = self._record()
        self._anchor = (anchor, self._since[0]) if anchor is not None else None

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """Waiting is over, computing begins."""
        self._lap(self._samples_of_wait())

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Computing is over, waiting begins."""
        self._lap(self._samples_of(event))

    def _samples_of(self, event: InstructionEvent) -> Samples:
        """Where an instruction belongs that ends."""
        return self.instructions[event.instruction.stage, event.instruction.type]

    def _samples_of_wait(self) -> Samples:
        """Where a wait belongs that ends."""
        return self.blocked

    def on_iteration_end(self, iteration: int) -> None:
        """Waiting for the other ranks is over."""
        self._lap(self._samples_of_wait())
        if self._anchor is not None:
            self._source.synchronize()
            self._resolve_marks(*self._anchor)
        self._since = self._anchor = None

    def _lap(self, samples: Samples) -> None:
        mark = self._record() if self._anchor is not None else None
        if mark is not None:
            self._marks.append((mark, samples))
            return
        time_s, energy_j = self._read()
        from_s, from_j = self._since or (time_s, energy_j)
        samples.intervals_s.append((from_s, time_s))
        samples.energies_j.append(energy_j - from_j)
        self._since = (time_s, energy_j)

    def _resolve_marks(self, anchor: DeviceMark, anchor_s: float) -> None:
        """Turn the marks of an iteration into intervals on the host's clock."""
        from_s = anchor_s
        for mark, samples in self._marks:
            until_s = anchor_s + anchor.elapsed_time(mark) / 1000
            samples.intervals_s.append((from_s, until_s))
            from_s = until_s
        self._marks.clear()

    def _read(self) -> tuple[float, float]:
        self._source.synchronize()  # kernels run asynchronously: what was launched must be over
        return self._time.now_s(), self._gpu.total_energy_mj() / 1000 if self._reads_directly else 0.0
