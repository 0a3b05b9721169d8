"""What noise does to a profile, and an honest way to take it out.

A lower clock makes no instruction faster, and draws no more power; and energy over time is convex: the valley between
clocks so high that the voltage costs more than it gains, and clocks so low that static power is paid for too long.
Where a profile says otherwise, the measurements are noisy, or the clock is not what limits the GPU: above a power cap
all clocks behave alike, and chance decides which of them looks fastest and which cheapest. A planner that takes the
points as they are picks the luckiest (the winner's curse).

`regularise` therefore goes through each instruction in two steps.

1. *Monotone.* Times that never fall and powers that never rise with falling clock: isotonic regression by pooling
   adjacent violators (Ayer et al., Annals of Mathematical Statistics 26(4), 1955), weighted by inverse variance where
   standard errors are known. The same for blocking powers.
2. *Convex within the error.* The convex energies with the least sum of absolute changes, in units of the standard
   errors (1 % where none is known), powers still monotone: a small linear programme. Changes within two standard errors
   are made. A measurement that would need more contradicts its neighbours beyond its error, so it is dropped, the worst
   one first, and the others are fitted again. The top clock always stays.

Measurements that contradict nothing stay exactly as they are. Of clocks that become equal the planner takes the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import highspy
import numpy as np

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.wording import counted
from lightning_pfo.planner.profile.profile import InstructionProfile, Profile

_ASSUMED_ERROR = 0.01
"""Standard error of an energy, relative to it, where the profile does not say."""

_LEAST_ERROR = 1e-4
"""No meter is as exact as this, whatever a profile says: below it there is what rounding leaves."""

_MOST_ERRORS = 2.0
"""Changes of an energy up to so many standard errors are within the error."""

_SAME_TIME = 1e-3
"""Times nearer than this to each other, relatively, say nothing about a slope between them."""

_MOST_ROWS = 500
"""Of more clocks than any GPU has so many are fitted; the powers of those in between are kept between theirs."""

_LEAST_WEIGHT = 1e-100
_UNCHANGED = 1e-9


@dataclass(frozen=True)
class Regularised:
    """A profile without contradictions.

    Attributes:
        profile: The regularised profile, without standard errors.
        notes: What was averaged, changed and dropped, line by line.
        dropped_mhz: Clocks that were dropped, by stage and kind of instruction.
    """

    profile: Profile
    notes: tuple[str, ...]
    dropped_mhz: Mapping[tuple[int, InstructionType], tuple[int, ...]]


def regularise(profile: Profile) -> Regularised:
    """Fit times, powers and energies that no noise explains away; see the module."""
    instructions, notes, dropped = {}, [], {}
    for (stage, kind), measured in profile.instructions.items():
        monotone, runs = _make_monotone(measured)
        convex, outliers = _make_convex(monotone, _errors_j(measured))
        kept = [row for row in range(len(measured.clocks_mhz)) if row not in outliers]
        instructions[stage, kind] = _rows(convex, kept)
        if outliers:
            dropped[stage, kind] = tuple(measured.clocks_mhz[row] for row in sorted(outliers))
        notes += [
            f"stage {stage} {kind.profile_name}: {note}" for note in _notes(measured, monotone, convex, runs, outliers)
        ]
    return Regularised(replace(profile, instructions=instructions), tuple(notes), dropped)


def _notes(
    measured: InstructionProfile,
    monotone: InstructionProfile,
    convex: InstructionProfile,
    runs: Sequence[range],
    outliers: Mapping[int, float],
) -> list[str]:
    clocks, notes = measured.clocks_mhz, []
    for run in runs:
        times = measured.times_s[run.start : run.stop]
        notes.append(
            f"no faster at {clocks[run[0]]} than at {clocks[run[-1]]} MHz "
            f"({counted(len(run), 'clock')}, {min(times):.4g}-{max(times):.4g} s)"
        )
    changes = [
        abs(after / before - 1)
        for row, (before, after) in enumerate(zip(monotone.energies_j, convex.energies_j, strict=True))
        if row not in outliers and before > 0
    ]
    changed = [change for change in changes if change > _UNCHANGED]
    if changed:
        notes.append(f"{counted(len(changed), 'energy', 'energies')} made convex by up to {100 * max(changed):.2g} %")
    for row, errors in sorted(outliers.items()):
        notes.append(f"dropped {clocks[row]} MHz, whose energy is {errors:.1f} standard errors off a convex curve")
    return notes


def _rows(measured: InstructionProfile, rows: Sequence[int]) -> InstructionProfile:
    """Some of the rows, without standard errors."""
    powers = measured.p2p_blocking_powers_w
    return InstructionProfile(
        tuple(measured.clocks_mhz[row] for row in rows),
        tuple(measured.times_s[row] for row in rows),
        tuple(measured.energies_j[row] for row in rows),
        tuple(powers[row] for row in rows) if powers else (),
        transfer_s=measured.transfer_s,
        unreached_mhz=tuple(clock for row in rows if (clock := measured.clocks_mhz[row]) in measured.unreached_mhz),
    )


def _make_monotone(measured: InstructionProfile) -> tuple[InstructionProfile, list[range]]:
    """The fitted measurements, and the runs of rows that are equally fast."""
    powers = [energy / time for energy, time in zip(measured.energies_j, measured.times_s, strict=True)]
    time_runs = _pool(measured.times_s, _weights(measured.time_stderrs_s, len(powers)))
    power_errors = [e / t for e, t in zip(measured.energy_stderrs_j, measured.times_s, strict=False)]
    power_runs = _pool([-power for power in powers], _weights(power_errors, len(powers)))
    times = [mean for run, mean in time_runs for _ in run]
    fitted_powers = [-mean for run, mean in power_runs for _ in run]
    untouched = [len(run) == 1 for run, _ in power_runs for _ in run]
    energies = [
        energy if alone and time == raw_time else power * time
        for energy, alone, time, raw_time, power in zip(
            measured.energies_j, untouched, times, measured.times_s, fitted_powers, strict=True
        )
    ]
    blocking = _pool([-power for power in measured.p2p_blocking_powers_w], [1.0] * len(powers))
    fitted = replace(
        measured,
        times_s=tuple(times),
        energies_j=tuple(energies),
        p2p_blocking_powers_w=tuple(-mean for run, mean in blocking for _ in run),
    )
    return fitted, [run for run, _ in time_runs if len(run) > 1]


def _make_convex(
    measured: InstructionProfile, errors_j: Sequence[float]
) -> tuple[InstructionProfile, dict[int, float]]:
    """The measurements with convex energies, and the rows dropped with their distance in standard errors."""
    times, energies = measured.times_s, list(measured.energies_j)
    rows = _rows_of_distinct_times(times)
    outliers: dict[int, float] = {}
    while len(rows) > 2:
        fitted = _convex_energies([times[k] for k in rows], [energies[k] for k in rows], [errors_j[k] for k in rows])
        if fitted is None:  # no solution to the solver's tolerance
            break
        off = {row: abs(fit - energies[row]) / errors_j[row] for row, fit in zip(rows, fitted, strict=True)}
        worst = sorted((row for row in rows if row > 0 and off[row] > _MOST_ERRORS), key=off.__getitem__, reverse=True)
        if not worst:
            for row, fit in zip(rows, fitted, strict=True):
                if off[row] * errors_j[row] > _UNCHANGED * energies[row]:
                    energies[row] = fit
            _fit_between(rows, times, energies)
            break
        # One at a time, and where there are many some at a time, so that few rounds do.
        dropped = {row: off[row] for row in worst[: max(1, len(outliers) // 8)]}
        outliers |= dropped
        rows = [row for row in rows if row not in dropped]
    return replace(measured, energies_j=tuple(energies)), outliers


def _rows_of_distinct_times(times: Sequence[float]) -> list[int]:
    """One row for each time; of clocks that are equally fast the lowest, which is the one to use."""
    same = _SAME_TIME
    if len(times) > _MOST_ROWS:
        same = max(same, math.expm1(math.log(times[-1] / times[0]) / _MOST_ROWS))
    rows = [len(times) - 1]
    for row in reversed(range(len(times) - 1)):
        if times[row] * (1 + same) < times[rows[-1]]:
            rows.append(row)
    return rows[::-1]


def _fit_between(rows: Sequence[int], times: Sequence[float], energies: list[float]) -> None:
    """Keep the powers of rows that were not fitted between those of the fitted ones around them."""
    above, following = math.inf, iter(rows)
    fitted = next(following)
    for row, time in enumerate(times):
        power = energies[row] / time
        if row > fitted:
            fitted = next(following, fitted)
        if row != fitted:
            least = energies[fitted] / times[fitted] if row < fitted else 0.0
            clamped = min(max(power, least), above)
            if clamped != power:
                energies[row] = clamped * time
                power = clamped
        above = power


def _convex_energies(times: Sequence[float], energies: Sequence[float], errors: Sequence[float]) -> list[float] | None:
    """The energies over strictly increasing times that are convex, with powers that never rise, nearest to the given.

    With changes u - v >= 0 of each energy: minimise sum (u + v) / error, in units of a mean energy.
    """
    count = len(times)
    unit = float(np.mean(energies)) or 1.0
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    infinity = highspy.kHighsInf
    weights = [unit / error for error in errors]
    for _ in range(2):
        for weight in weights:
            solver.addVar(0.0, infinity)
            solver.changeColCost(solver.getNumCol() - 1, weight / max(weights))

    def require(coefficients: Mapping[int, float]) -> None:
        """Sum of coefficient x fitted energy >= 0."""
        scale = max(map(abs, coefficients.values()))
        terms = {k: value / scale for k, value in coefficients.items()}
        lower = -sum(value * energies[k] / unit for k, value in terms.items())
        columns = [*terms, *(count + k for k in terms)]
        values = [*terms.values(), *(-value for value in terms.values())]
        solver.addRow(lower, infinity, len(columns), np.array(columns, dtype=np.int32), np.array(values))

    for a, b in pairwise(range(count)):
        require({a: 1 / times[a], b: -1 / times[b]})
    for b in range(1, count - 1):
        before, after = times[b] - times[b - 1], times[b + 1] - times[b]
        require({b - 1: 1 / before, b: -1 / before - 1 / after, b + 1: 1 / after})
    for k in range(count):
        require({k: 1.0})
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    values = solver.getSolution().col_value
    return [energies[k] + unit * (values[k] - values[count + k]) for k in range(count)]


def _pool(values: Sequence[float], weights: Sequence[float]) -> list[tuple[range, float]]:
    """The non-decreasing sequence nearest to `values` in weighted least squares, as runs of equal values."""
    runs: list[tuple[range, float]] = []
    totals: list[float] = []  # weight of each run
    for row, (value, weight) in enumerate(zip(values, weights, strict=False)):
        run, mean, total = range(row, row + 1), value, weight
        while runs and runs[-1][1] > mean:
            (before, other), other_total = runs.pop(), totals.pop()
            run = range(before.start, run.stop)
            mean += (other - mean) * (other_total / (total + other_total))
            total += other_total
        runs.append((run, mean))
        totals.append(total)
    return runs


def _weights(errors: Sequence[float], count: int) -> list[float]:
    """Inverse variances relative to the largest; equal where an error is not known or zero."""
    if not errors or min(errors) <= 0:
        return [1.0] * count
    return [max((min(errors) / error) ** 2, _LEAST_WEIGHT) for error in errors]


def _errors_j(measured: InstructionProfile) -> list[float]:
    """Standard errors of the energies; a standard error of zero comes from a single sample and says nothing."""
    known = measured.energy_stderrs_j or (0.0,) * len(measured.clocks_mhz)
    floor = 1e-9 * max(measured.energies_j) or 1.0
    return [
        max(error, _LEAST_ERROR * energy) if error > 0 else max(_ASSUMED_ERROR * energy, floor)
        for error, energy in zip(known, measured.energies_j, strict=True)
    ]
