"""What noise does to a profile, and an honest way to take it out.

A lower clock makes no instruction faster, and draws no more power. Where a profile says so, the measurements are noisy,
or the clock is not what limits the GPU: above a power cap all clocks behave alike, and chance decides which of them
looks fastest and which cheapest. A planner that takes the points as they are picks the luckiest (the winner's curse).

`regularise` therefore fits, per instruction, times that never fall and powers that never rise with falling clock:
isotonic regression by pooling adjacent violators (Ayer et al., Annals of Mathematical Statistics 26(4), 1955), weighted
by inverse variance where standard errors are known. Measurements that contradict nothing stay exactly as they are, and
all clocks stay in the profile; of clocks that become equal the planner takes the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pfo.planner.profile import InstructionProfile, Profile


@dataclass(frozen=True)
class Regularised:
    """A profile without contradictions.

    Attributes:
        profile: The regularised profile, without standard errors.
        notes: What was averaged: a line for each run of clocks that are equally fast.
    """

    profile: Profile
    notes: tuple[str, ...]


def regularise(profile: Profile) -> Regularised:
    """Average measurements at which a lower clock was faster, or drew more power."""
    instructions, notes = {}, []
    for (stage, kind), measured in profile.instructions.items():
        instructions[stage, kind], runs = _regularise(measured)
        for run in runs:
            clocks = measured.clocks_mhz[run.start : run.stop]
            times = measured.times_s[run.start : run.stop]
            notes.append(
                f"stage {stage} {kind.profile_name}: no faster at {clocks[0]} than at {clocks[-1]} MHz "
                f"({len(run)} clocks, {min(times):.4g}-{max(times):.4g} s)"
            )
    return Regularised(replace(profile, instructions=instructions), tuple(notes))


def _regularise(measured: InstructionProfile) -> tuple[InstructionProfile, list[range]]:
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
    fitted = replace(measured, times_s=tuple(times), energies_j=tuple(energies), time_stderrs_s=(), energy_stderrs_j=())
    return fitted, [run for run, _ in time_runs if len(run) > 1]


def _pool(values: Sequence[float], weights: Sequence[float]) -> list[tuple[range, float]]:
    """The non-decreasing sequence nearest to `values` in weighted least squares, as runs of equal values."""
    runs: list[tuple[range, float]] = []
    for row, value in enumerate(values):
        run, mean = range(row, row + 1), value
        while runs and runs[-1][1] > mean:
            run = range(runs.pop()[0].start, run.stop)
            mean = sum(values[k] * weights[k] for k in run) / sum(weights[k] for k in run)
        runs.append((run, mean))
    return runs


def _weights(errors: Sequence[float], count: int) -> list[float]:
    """Inverse variances; equal where an error is not known or zero."""
    if not errors or min(errors) <= 0:
        return [1.0] * count
    return [error**-2 for error in errors]
