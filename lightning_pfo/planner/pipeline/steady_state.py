"""Where a schedule repeats itself: the middle of each rank's steady state.

A rank's order is periodic between two positions if every instruction recurs `period` positions later, some
microbatches on: `B F B F ...` in the steady state of 1F1B, `F F F ...` and `B B B ...` in GPipe, longer patterns in
interleaved, zero-bubble and V-shaped schedules. Nothing but the order is looked at, so an order of your own will do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner.network.periodic_path import PeriodicPath

_CLEARLY_LONGER = 1.05
_LEAST_PERIODS = 4


@dataclass(frozen=True)
class _Repetition:
    """A periodic part of an order: positions from `begin` to `end`, `shift` microbatches on (or back) per period."""

    begin: int
    end: int
    period: int
    shift: int

    @property
    def num_periods(self) -> int:
        return (self.end - self.begin) // self.period


def steady_middles(schedule: PipelineSchedule, *, margin: int, pieces: int = 1) -> list[PeriodicPath]:
    """The middle of each periodic part of each rank's order, in whole periods.

    Parts whose middle is shorter than two margins are left out, so a pipeline of few microbatches has none.

    Args:
        schedule: The order.
        margin: Microbatches at either end of a periodic part that are taken for its beginning or its end.
        pieces: A middle is cut into so many paths of about equal length, so that the pace may change along it.
    """
    middles = []
    for rank, order in enumerate(schedule.orders):
        for part in _repetitions(order):
            skipped = -(-margin // abs(part.shift))
            periods = part.num_periods - 2 * skipped
            if periods * abs(part.shift) >= 2 * margin:
                begin = schedule.span(rank).start + part.begin + skipped * part.period
                bounds = [begin + part.period * (periods * i // pieces) for i in range(pieces + 1)]
                middles += [PeriodicPath(*piece, part.period) for piece in pairwise(bounds) if piece[0] < piece[1]]
    return sorted(middles, key=lambda path: path.begin)


def _repetitions(order: Sequence[Instruction]) -> Iterator[_Repetition]:
    """The longest periodic part of an order, then those of what is left on both sides of it."""
    kinds: dict[Any, int] = {}
    labels = np.array([kinds.setdefault((inst.stage, inst.type), len(kinds)) for inst in order])
    microbatches = np.array([inst.microbatch for inst in order])
    pending = [(0, len(order))]
    while pending:
        begin, end = pending.pop()
        part = _longest_repetition(labels[begin:end], microbatches[begin:end], begin)
        if part is not None and part.num_periods >= _LEAST_PERIODS:
            yield part
            pending += [(begin, part.begin), (part.end, end)]


def _longest_repetition(
    labels: npt.NDArray[np.int64], microbatches: npt.NDArray[np.int64], offset: int
) -> _Repetition | None:
    """The longest periodic part; of parts about equally long the one of the shortest period."""
    best = None
    for period in range(1, len(labels) // _LEAST_PERIODS + 1):
        shifts = np.where(labels[period:] == labels[:-period], microbatches[period:] - microbatches[:-period], 0)
        bounds = np.flatnonzero(np.diff(shifts, prepend=shifts[0] - 1, append=shifts[-1] - 1))
        lengths = np.where(shifts[bounds[:-1]] == 0, 0, np.diff(bounds))
        longest = int(lengths.argmax())
        length = int(lengths[longest]) + period
        if lengths[longest] and (best is None or length > _CLEARLY_LONGER * (best.end - best.begin)):
            begin = int(bounds[longest])
            best = _Repetition(offset + begin, offset + begin + length, period, int(shifts[begin]))
    return best
