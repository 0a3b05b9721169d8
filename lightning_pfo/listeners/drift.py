"""What a GPU that gets warmer or cooler during a scan does to its energies, and how they compare nevertheless.

Chips leak more the warmer they are: power rises by some tenths of a per cent with each degree, at any clock. A scan
from the highest clock down would take a GPU that warms up for one that needs more at low clocks. So the top clock is
measured again, in between and at the end::

    clock           1410 1350 1290 1230 1410 1170 1110 1410
    temperature       41   52   58   61   64   65   64   66
    power at 1410    392                 404            406      slope: watts per degree

The slope that these visits show takes all energies, and the power of waiting, to the temperature of the last visit. The
uncertainty of the slope goes into their standard errors. Where the temperature is not told, or does not explain what
the visits show, that is flagged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_pfo.core.flags import DRIFT
from lightning_pfo.listeners.profile_row import ProfileRow

_LEAST_SPREAD_C = 1.0
"""Temperatures that differ by less do not tell a slope: sensors tell whole degrees."""

_SURE = 2.0
"""Standard errors by which a slope must differ from none, and what is left over from what is expected."""

Place = tuple[int, int, int]
"""Stage, replica and rank of tensor parallelism: what is measured on one GPU."""


@dataclass(frozen=True)
class Drift:
    """How the power of one GPU at its top clock changed between visits.

    Attributes:
        slope_w_per_c: Watts that a degree makes; 0 where none is seen.
        stderr_w_per_c: Standard error of that.
        reference_c: The temperature that energies are taken to; nan where it is not told.
        unexplained: What is left of the change of power, or of time, as a share of it; 0 where uncertainty explains it.
    """

    slope_w_per_c: float
    stderr_w_per_c: float
    reference_c: float
    unexplained: float


def without_drift(rows: Sequence[ProfileRow], visits: Sequence[ProfileRow], most_left: float) -> list[ProfileRow]:
    """Take the energies of a scan to the temperature of the last visit to the top clock.

    Args:
        rows: What was measured.
        visits: What was measured when the top clock was visited again; none: nothing can be said.
        most_left: A drift of a larger share than this is flagged where it is not explained.
    """
    drifts = _drifts(rows, visits)
    return [_corrected(row, drifts.get(_place(row)), most_left) for row in rows]


def _place(row: ProfileRow) -> Place:
    return row.stage, row.dp_rank, row.tp_rank


def _drifts(rows: Sequence[ProfileRow], visits: Sequence[ProfileRow]) -> Mapping[Place, Drift]:
    by_place: dict[Place, dict[str, list[ProfileRow]]] = defaultdict(lambda: defaultdict(list))
    top_mhz = {(_place(row), row.instruction): row.frequency for row in visits}
    for row in (*rows, *visits):
        if top_mhz.get((_place(row), row.instruction)) == row.frequency:
            by_place[_place(row)][row.instruction].append(row)
    return {place: _drift(list(kinds.values())) for place, kinds in by_place.items()}


def _drift(kinds: Sequence[Sequence[ProfileRow]]) -> Drift:
    """One slope for all kinds of instructions of a GPU, by least squares; the first and the last visit come first."""
    reference_c = _mean([seen[-1].temperature_c for seen in kinds])
    of_slope = of_power = squares_w2 = 0.0
    freedom = -1
    variances_w2 = []
    for seen in kinds:
        mean_c, mean_w = _mean([row.temperature_c for row in seen]), _mean([_power_w(row) for row in seen])
        of_slope += math.fsum((row.temperature_c - mean_c) ** 2 for row in seen)
        of_power += math.fsum((row.temperature_c - mean_c) * (_power_w(row) - mean_w) for row in seen)
        squares_w2 += math.fsum((_power_w(row) - mean_w) ** 2 for row in seen)
        variances_w2 += [_variance_w2(row) for row in seen]
        freedom += len(seen) - 1
    expected_w2 = _mean(variances_w2)
    spread_c = max(max(row.temperature_c for row in seen) - min(row.temperature_c for row in seen) for seen in kinds)
    slope = stderr = 0.0
    left_w2 = squares_w2 / max(freedom + 1, 1)
    if spread_c >= _LEAST_SPREAD_C:  # not where it is nan
        fitted = of_power / of_slope
        scatter_w2 = max(squares_w2 - fitted * of_power, 0.0) / max(freedom, 1)
        stderr = math.sqrt(max(expected_w2, scatter_w2) / of_slope)
        if abs(fitted) > _SURE * stderr:
            slope, left_w2 = fitted, scatter_w2
        else:
            stderr = math.hypot(fitted, stderr)
    power_w = _mean([_power_w(row) for seen in kinds for row in seen])
    unexplained = math.sqrt(left_w2) / power_w if power_w and left_w2 > _SURE**2 * expected_w2 else 0.0
    slower = max(
        (max(row.time for row in seen) - min(row.time for row in seen)) / seen[0].time
        if max(row.time for row in seen) - min(row.time for row in seen)
        > 2 * _SURE * math.hypot(*(row.time_stderr for row in seen))
        else 0.0
        for seen in kinds
    )
    return Drift(slope, stderr, reference_c, max(unexplained, slower))


def _corrected(row: ProfileRow, drift: Drift | None, most_left: float) -> ProfileRow:
    if drift is None:
        return row
    if drift.unexplained > most_left:
        row = replace(
            row,
            flags=" ".join(sorted({*row.flags.split(), DRIFT})),
            energy_stderr=math.hypot(row.energy_stderr, drift.unexplained * row.energy),
        )
    warmer_c = drift.reference_c - row.temperature_c
    if math.isnan(warmer_c):
        return row
    more_w = drift.slope_w_per_c * warmer_c
    return replace(
        row,
        energy=max(row.energy + more_w * row.time, 0.0),
        energy_stderr=math.hypot(row.energy_stderr, drift.stderr_w_per_c * warmer_c * row.time),
        p2p_blocking_power_w=max(row.p2p_blocking_power_w + more_w, 0.0),
    )


def _power_w(row: ProfileRow) -> float:
    return row.energy / row.time


def _variance_w2(row: ProfileRow) -> float:
    return (row.energy_stderr / row.time) ** 2 + (row.energy * row.time_stderr / row.time**2) ** 2


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
