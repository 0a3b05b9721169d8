"""The exponential curve that Perseus fits."""

import numpy as np
import pytest

from lightning_pfo.planner.policies.exponential import fit_exponential

TIMES = np.linspace(0.05, 0.12, 12)


@pytest.mark.parametrize("decay", [8.0, 40.0, 120.0])
def test_a_curve_of_this_form_is_found_again(decay):
    costs = 30 * np.exp(-decay * TIMES) + 4
    assert fit_exponential(TIMES, costs).at(TIMES) == pytest.approx(costs, rel=1e-4)


def test_no_curve_of_a_fine_grid_is_nearer_to_noisy_points():
    costs = 30 * np.exp(-30 * TIMES) + 4 + np.random.default_rng(0).normal(0, 0.3, len(TIMES))
    ours = ((fit_exponential(TIMES, costs).at(TIMES) - costs) ** 2).sum()
    errors = []
    for decay in np.linspace(0.5, 200, 400):
        columns = np.stack([np.exp(-decay * TIMES), np.ones(len(TIMES))]).T
        (scale, _), residuals, *_ = np.linalg.lstsq(columns, costs, rcond=None)
        if scale >= 0:
            errors.extend(residuals)
    assert ours <= min(errors) * (1 + 1e-6)


def test_points_that_rise_or_are_alone_get_a_flat_curve():
    rising = fit_exponential(TIMES, TIMES)
    assert rising.at(TIMES) == pytest.approx(np.full(len(TIMES), TIMES.mean()))
    assert fit_exponential([0.1], [3.0]).at(np.array([0.1, 0.2])) == pytest.approx([3.0, 3.0])
