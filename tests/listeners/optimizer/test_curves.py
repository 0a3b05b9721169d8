from dataclasses import replace

import numpy as np
import pytest

from lightning_pfo.device import load_gpu_config
from lightning_pfo.planner import InstructionProfile
from lightning_pfo.planner.adaptive.choice import bracket, fitted_profile
from lightning_pfo.planner.adaptive.curves import fit_curve
from tests.listeners.optimizer.replay import at_clocks, emulated_profile


@pytest.fixture(scope="module")
def full():
    return emulated_profile(load_gpu_config("emulated_v100"), work=(0.05,))


def part(full, clocks):
    return next(iter(at_clocks(full, [set(clocks)]).instructions.values()))


def test_physics_is_found_from_few_clocks(full):
    profile, held_mhz = full
    whole = next(iter(profile.instructions.values()))
    clocks = whole.clocks_mhz
    few = [*clocks[:: len(clocks) // 7], clocks[-1]]
    curve = fit_curve(part(profile, few), clocks, held_mhz)
    assert np.allclose(curve.times_s, whole.times_s, rtol=1e-6)
    assert np.allclose(curve.energies_j, whole.energies_j, rtol=0.012)


def test_uncertainty_is_small_where_something_was_measured_and_grows_away_from_it(full):
    profile, held_mhz = full
    clocks = next(iter(profile.instructions.values())).clocks_mhz
    curve = fit_curve(part(profile, bracket(clocks)), clocks, held_mhz)
    errors = dict(zip(clocks, curve.errors, strict=True))
    measured = bracket(clocks)
    between = min(clocks, key=lambda mhz: abs(mhz - (measured[1] + measured[2]) / 2))
    assert max(errors[mhz] for mhz in measured) < 0.005 < errors[clocks[-1]]
    assert errors[measured[1]] < errors[between] < errors[clocks[-1]]


def test_trying_a_measurement_out_shrinks_uncertainty_as_making_it_does(full):
    profile, held_mhz = full
    clocks = next(iter(profile.instructions.values())).clocks_mhz
    curve = fit_curve(part(profile, bracket(clocks)), clocks, held_mhz)
    tried = curve.with_measured(clocks[-1])
    assert tried.errors[-1] < 0.1 * curve.errors[-1]
    assert np.all(tried.errors <= curve.errors + 1e-12)
    assert np.array_equal(tried.energies_j, curve.energies_j)


def test_a_cap_that_nobody_has_seen_is_found():
    clocks = tuple(range(1700, 800, -50))
    held = [min(mhz, 1500) for mhz in clocks]
    times_s = tuple(0.1 * (0.9 * 1500 / mhz + 0.1) for mhz in held)
    energies_j = tuple(t * (60 + 240 * (mhz / 1500) ** 3) for t, mhz in zip(times_s, held, strict=True))
    few = InstructionProfile(clocks[::2], times_s[::2], energies_j[::2])
    curve = fit_curve(few, clocks)
    assert np.allclose(curve.times_s, times_s, rtol=0.004)
    assert np.allclose(curve.energies_j, energies_j, rtol=0.01)


def test_a_measurement_that_says_it_is_bad_counts_little(full):
    profile, held_mhz = full
    whole = next(iter(profile.instructions.values()))
    clocks = whole.clocks_mhz
    few = part(profile, [*clocks[:: len(clocks) // 7], clocks[-1]])
    wrong = len(few.clocks_mhz) // 2
    energies_j = [energy * (1.07 if n == wrong else 1.0) for n, energy in enumerate(few.energies_j)]
    told_j = [energy * (0.09 if n == wrong else 0.002) for n, energy in enumerate(few.energies_j)]
    curve = fit_curve(replace(few, energies_j=tuple(energies_j), energy_stderrs_j=tuple(told_j)), clocks, held_mhz)
    assert np.allclose(curve.energies_j, whole.energies_j, rtol=0.015)


def test_what_is_hoped_for_is_an_energy_even_where_next_to_nothing_was_measured(full):
    profile, held_mhz = full
    clocks = next(iter(profile.instructions.values())).clocks_mhz
    two = at_clocks(profile, [set(bracket(clocks)[:2])])
    curves = {kind: fit_curve(one, clocks, held_mhz) for kind, one in two.instructions.items()}
    assert max(next(iter(curves.values())).errors) > 1  # of which energies would be negative
    hopeful = fitted_profile(two, curves, clocks[-1], hope=1)
    assert min(next(iter(hopeful.instructions.values())).energies_j) > 0
