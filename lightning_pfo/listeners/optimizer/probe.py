"""Measuring a clock inside useful training: in a part of an iteration, with the rest at the top clock.

::

    order   F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
    clock   top ....... | 1110 ............| top ..........
    counts                 no  yes yes yes yes                  the first ones: the clock is on its way

So little time is lost, and each rank may measure a clock of its own at once: an instruction takes its time and energy
whoever waits for it. Where an iteration has too few instructions for that, all of it is at the clock, twice, and the
second time counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_pfo.core.events import InstructionEvent
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import Instruction, InstructionType
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.meters.instructions import InstructionMeter, Kind, Samples

_WANTED = 2
"""So many instructions of each kind are measured in an iteration, where there are as many."""

# No stage has these numbers.
_REST: Kind = (-1, InstructionType.FORWARD)
_REST_OF_WAITS: Kind = (-2, InstructionType.FORWARD)


@dataclass(frozen=True)
class Probe:
    """Which part of a rank's order is at the clock, and which instructions count.

    Attributes:
        begin: Number of the first instruction at the clock.
        counts_from: Number of the first one that counts.
        end: Number of the one after the last.
        iterations: The last of so many iterations counts.
    """

    begin: int
    counts_from: int
    end: int
    iterations: int = 1


def probe_of(order: Sequence[Instruction], times_s: Mapping[Kind, float], settle_s: float) -> Probe:
    """The shortest part of an order in which all kinds of instructions can be measured, near the middle.

    Args:
        order: What a rank executes.
        times_s: Time of each kind of instruction at the top clock, s.
        settle_s: Time that a clock may take to change.
    """
    kinds = [(instruction.stage, instruction.type) for instruction in order]
    until_s = list(accumulate((times_s[kind] for kind in kinds), initial=0.0))
    for wanted in range(_WANTED, 0, -1):
        found = []
        for begin in range(len(kinds)):
            counts_from = next((n for n in range(begin, len(kinds)) if until_s[n] - until_s[begin] >= settle_s), None)
            end = None if counts_from is None else _end(kinds, counts_from, wanted)
            if counts_from is not None and end is not None:
                found.append(Probe(begin, counts_from, end))
        if found:
            shortest = min(probe.end - probe.begin for probe in found)
            equal = [probe for probe in found if probe.end - probe.begin == shortest]
            return equal[len(equal) // 2]
    return whole_iterations(order)


def whole_iterations(order: Sequence[Instruction]) -> Probe:
    """All of an order at the clock, in two iterations or more, of which the first does not count."""
    return Probe(0, 0, len(order), iterations=2)


def _end(kinds: Sequence[Kind], begin: int, wanted: int) -> int | None:
    """Where each kind has been met so often since `begin`; None if there are not as many."""
    missing = Counter(dict.fromkeys(kinds, wanted))
    for position in range(begin, len(kinds)):
        missing[kinds[position]] -= 1
        if max(missing.values()) <= 0:
            return position + 1
    return None


def probe_plan(
    schedule: PipelineSchedule, tops_mhz: Sequence[int], clocks_mhz: Sequence[int], probes: Sequence[Probe]
) -> FrequencyPlan:
    """The clocks of an iteration in which each rank measures one.

    Args:
        schedule: What is executed.
        tops_mhz: The top clock of each rank.
        clocks_mhz: The clock that each rank measures.
        probes: In which part of its order.
    """
    rows = tuple(
        tuple(mhz if probe.begin <= position < probe.end else top for position in range(len(order)))
        for order, top, mhz, probe in zip(schedule.orders, tops_mhz, clocks_mhz, probes, strict=True)
    )
    return FrequencyPlan(schedule, rows, float("nan"), float("nan"))


class ProbeMeter(InstructionMeter):
    """Measures the instructions of a probe that count, apart from the rest; all of them while there is no probe.

    It waits for no tick of an energy counter: that would slow the training down, and let each iteration begin at the
    same place of a tick, so that more of them told nothing new.
    """

    tick_timeout_s = 0.0
    _probe: Probe | None = None
    _positions: Mapping[Instruction, int] = {}
    _latest = -1  # position of the last instruction that began

    def use(self, order: Sequence[Instruction], probe: Probe | None) -> None:
        """Begin to measure with this probe."""
        self._probe = probe
        self._positions = {instruction: position for position, instruction in enumerate(order)}
        self.reset()

    def on_iteration_begin(self, iteration: int) -> None:
        """See `InstructionMeter`."""
        self._latest = -1
        super().on_iteration_begin(iteration)

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """See `InstructionMeter`."""
        super().on_instruction_begin(event)
        self._latest = self._positions[event.instruction]

    def _samples_of(self, event: InstructionEvent) -> Samples:
        if self._probe is None or self._probe.counts_from <= self._positions[event.instruction] < self._probe.end:
            return super()._samples_of(event)
        return self.instructions[_REST]

    def _samples_of_wait(self) -> Samples:
        """A wait counts between two instructions that do."""
        if self._probe is None or self._probe.counts_from <= self._latest < self._probe.end - 1:
            return super()._samples_of_wait()
        return self.instructions[_REST_OF_WAITS]
