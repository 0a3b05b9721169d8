"""Energy of iterations from a counter that ticks; the truth is the power that it was made from."""

import random

import numpy as np
import pytest

from lightning_pfo.device.energy.trace import EnergyTrace
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.meters.ticks import mean_energies
from lightning_pfo.planner.adaptive.verification import verified
from lightning_pfo.planner.adaptive.windows import Windows

WAITING_W, TOP_W, PLAN_W = 70.0, 400.0, 300.0


class Training:
    """Windows of iterations in which a GPU waits at first and at last, and computes for most of the time between."""

    def __init__(self, seed, windows, tick_s, lag_s):
        chance = random.Random(seed)
        self.windows, self.measured, self.groups = windows, [], {}
        moments_s, energies_j = [0.0], [0.0]
        waits_s = chance.uniform(0.05, 0.15)
        self.exact_j = {True: [], False: []}

        def spend(duration_s, power_w):
            moments_s.append(moments_s[-1] + duration_s)
            energies_j.append(energies_j[-1] + duration_s * power_w)

        spend(chance.uniform(0.5, 0.7), WAITING_W)
        for step in range(windows.num_steps):
            begin_s, begin_j = moments_s[-1], energies_j[-1]
            is_plan = windows.place_of(step)[1]
            spend(waits_s, WAITING_W)
            for _ in range(8):
                spend(0.05, PLAN_W if is_plan else TOP_W)
                spend(0.003, WAITING_W)
            spend(waits_s, WAITING_W)
            used_j = energies_j[-1] - begin_j
            self.groups.setdefault(windows.group_of(step), []).append((begin_s, moments_s[-1]))
            self.measured.append(IterationMeasurement(step, moments_s[-1] - begin_s, used_j))
            if windows.is_measured(step):
                self.exact_j[is_plan].append(used_j)
        spend(0.5, WAITING_W)
        ticks_s = np.arange(0.0, moments_s[-1], tick_s)
        self.trace = EnergyTrace(ticks_s, np.interp(ticks_s - lag_s, moments_s, energies_j), 1e-4)

    def saving(self):
        """Exactly, and as it is read."""
        found = verified(self.windows, 0, self.measured, mean_energies(self.trace, self.groups))
        return 100 * (1 - np.mean(self.exact_j[True]) / np.mean(self.exact_j[False])), found


@pytest.mark.parametrize(("steps", "most"), [(2, 3.0), (11, 0.4)])
@pytest.mark.parametrize(("tick_s", "lag_s"), [(0.1, 0.0), (0.1, 0.08), (0.02, 0.02)])
def test_the_saving_is_within_its_interval(steps, most, tick_s, lag_s):
    covered = []
    for seed in range(30):
        exact, found = Training(seed, Windows(6, steps, 1), tick_s, lag_s).saving()
        low, high = found.saving_interval_percent
        assert found.saving_percent == pytest.approx(exact, abs=most)
        covered.append(low <= exact <= high)
    assert sum(covered) >= 28


def test_more_iterations_in_a_row_are_known_better():
    errors = []
    for steps in (2, 11):
        training = Training(1, Windows(6, steps, 1), 0.1, 0.0)
        means = mean_energies(training.trace, training.groups)
        errors.append(means[0, True, True].stderr_j)
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.2)


def test_two_ticks_are_needed():
    assert mean_energies(EnergyTrace([1.0], [5.0], 1e-3), {"all": [(0.0, 1.0)]}) == {}
