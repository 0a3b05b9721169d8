import itertools
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.planner import InstructionProfile, Profile, plan_frontier, read_profile, regularise, write_profile
from lightning_pfo.planner.profile import denoise
from tests.planner.problems import with_transfers

F, B = InstructionType.FORWARD, InstructionType.BACKWARD
positive = st.floats(0.1, 10)


def one_stage(measured):
    return Profile({(0, F): measured, (0, B): measured})


@example([(5.75, 1.0), (6.0, 1.0), (8.0, 8.0), (7.0, 3.0)])
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(positive, positive), min_size=1, max_size=10))
def test_times_never_fall_and_powers_never_rise_with_falling_clock(points):
    times, energies = zip(*points, strict=True)
    clocks = tuple(range(1400, 1400 - len(points), -1))
    regular = regularise(one_stage(InstructionProfile(clocks, times, energies)))
    fitted, dropped = regular.profile.of(0, F), regular.dropped_mhz.get((0, F), ())
    assert sorted((*fitted.clocks_mhz, *dropped), reverse=True) == list(clocks)
    assert fitted.clocks_mhz[0] == clocks[0]
    assert all(a <= b * (1 + 1e-12) for a, b in itertools.pairwise(fitted.times_s))
    powers = [e / t for e, t in zip(fitted.energies_j, fitted.times_s, strict=True)]
    assert all(a >= b * (1 - 1e-6) for a, b in itertools.pairwise(powers))
    if not dropped:
        assert sum(fitted.times_s) == pytest.approx(sum(times))  # least squares keeps the mean


def test_a_profile_without_contradictions_is_left_alone(profile):
    regular = regularise(profile)
    assert regular.profile == profile
    assert regular.notes == ()
    assert regular.dropped_mhz == {}


def test_times_of_transfers_stay_as_they_are(profile):
    slow = with_transfers(profile, lambda stage, kind: None if kind is B else 0.001 * (1 + stage))
    assert regularise(slow).profile == slow


def test_errors_of_any_size_are_weights():
    for error in (1e-300, 1e300):
        points = (1400, 1300, 1200), (1.0, 0.9, 1.2), (300.0, 200.0, 190.0)
        regular = regularise(one_stage(InstructionProfile(*points, (), (error,) * 3, (error, 1.0, error))))
        assert regular.profile.of(0, F).times_s[:2] == pytest.approx((0.95, 0.95))


def test_a_power_cap_becomes_one_time_and_power_and_is_reported():
    noisy = InstructionProfile((1700, 1600, 1500, 1400), (0.102, 0.098, 0.100, 0.120), (30.6, 29.4, 30.0, 31.0))
    regular = regularise(one_stage(noisy))
    fitted = regular.profile.of(0, F)
    assert fitted.times_s == pytest.approx((0.1, 0.1, 0.1, 0.12))
    assert fitted.energies_j == pytest.approx((30.0, 30.0, 30.0, 31.0))
    assert regular.notes[0] == "stage 0 forward: no faster at 1700 than at 1600 MHz (2 clocks, 0.098-0.102 s)"
    plan = plan_frontier(regular.profile, num_microbatches=2, p2p_blocking_power_w=50, num_plans=3).fastest
    assert set(plan.clocks_mhz[0]) == {1500}  # the lowest clock that is as fast


def test_flat_times_of_a_memory_bound_instruction_keep_their_falling_energy():
    flat = InstructionProfile((1200, 1100, 1000), (0.101, 0.1, 0.102), (30.0, 27.0, 25.0))
    energies = regularise(one_stage(flat)).profile.of(0, F).energies_j
    assert energies[0] > energies[1] > energies[2]


def test_exact_measurements_weigh_more_than_uncertain_ones(tmp_path):
    rows = [
        {"stage": 0, "instruction": kind, "frequency": mhz, "time": time, "energy": 10.0, "time_stderr": error}
        for kind in (F, B)
        for mhz, time, error in ((1400, 0.2, 0.03), (1300, 0.1, 0.01))
    ]
    write_profile(tmp_path / "profile.csv", rows)
    measured = read_profile(tmp_path / "profile.csv")
    assert measured.of(0, F).time_stderrs_s == (0.03, 0.01)
    assert regularise(measured).profile.of(0, B).times_s == pytest.approx((0.11, 0.11))


def valley(clocks, noise=lambda: 1.0):
    """Times and energies of the textbook, with noise on the energies."""
    times = [0.08 * clocks[0] / clock + 0.02 for clock in clocks]
    powers = [90 + 310 * (clock / clocks[0]) ** 2.5 for clock in clocks]
    return tuple(times), tuple(t * p * noise() for t, p in zip(times, powers, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_noise_becomes_a_convex_curve_within_the_error(seed):
    draw = random.Random(seed)
    clocks = tuple(range(1400, 700, -50))
    times, energies = valley(clocks, lambda: draw.gauss(1, 0.004))
    noisy = InstructionProfile(clocks, times, energies, energy_stderrs_j=tuple(0.004 * e for e in energies))
    regular = regularise(one_stage(noisy))
    fitted = regular.profile.of(0, F)
    slopes = [
        (b - a) / (t - s) for (s, a), (t, b) in itertools.pairwise(zip(fitted.times_s, fitted.energies_j, strict=True))
    ]
    assert all(a <= b + 1e-6 * abs(a) for a, b in itertools.pairwise(slopes))
    assert len(fitted.clocks_mhz) >= len(clocks) - 2
    for clock, energy in zip(fitted.clocks_mhz, fitted.energies_j, strict=True):
        assert energy == pytest.approx(noisy.at(clock)[1], rel=0.02)
    assert any("made convex by up to" in note for note in regular.notes)

    exact = valley(clocks)[1]
    raw_error = max(abs(a / b - 1) for a, b in zip(energies, exact, strict=True))
    errors = [abs(e / exact[clocks.index(c)] - 1) for c, e in zip(fitted.clocks_mhz, fitted.energies_j, strict=True)]
    assert max(errors) <= raw_error * 1.2  # no further from the truth than what was measured


def test_what_contradicts_its_neighbours_beyond_its_error_is_dropped_and_reported():
    clocks = (1400, 1300, 1200, 1100, 1000, 900)
    times, energies = valley(clocks)
    lucky = (*energies[:3], 0.85 * energies[3], *energies[4:])
    # nothing but its energy is wrong: powers still fall with the clock
    regular = regularise(one_stage(InstructionProfile(clocks, times, lucky)))
    assert regular.dropped_mhz == {(0, F): (1100,), (0, B): (1100,)}
    assert regular.profile.of(0, F).clocks_mhz == (1400, 1300, 1200, 1000, 900)
    assert any("stage 0 forward: dropped 1100 MHz" in note for note in regular.notes)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.3])
def test_fifty_thousand_clocks_take_no_more_rounds_than_some_hundred(noise, monkeypatch):
    fitted_rows = []
    fit = denoise._convex_energies
    monkeypatch.setattr(denoise, "_convex_energies", lambda *a: fitted_rows.append(len(a[0])) or fit(*a))
    draw = random.Random(0)
    clocks = tuple(range(60_000, 10_000, -1))
    times, energies = valley(clocks, lambda: draw.uniform(1 - noise, 1 + noise))
    times = tuple(time * draw.uniform(1 - noise, 1 + noise) for time in times)
    regular = regularise(one_stage(InstructionProfile(clocks, times, energies)))
    assert max(fitted_rows) <= 501
    assert len(fitted_rows) <= 2 * 60  # of two instructions
    fitted = regular.profile.of(0, F)
    powers = [e / t for e, t in zip(fitted.energies_j, fitted.times_s, strict=True)]
    assert all(a >= b * (1 - 1e-6) for a, b in itertools.pairwise(powers))


def test_pooling_is_as_by_the_textbook():
    draw = random.Random(1)
    values, weights = [draw.random() for _ in range(300)], [draw.uniform(0.1, 1) for _ in range(300)]
    pooled = [mean for run, mean in denoise._pool(values, weights) for _ in run]
    # min-max formula of isotonic regression
    sums = [[0.0] * 301 for _ in range(2)]
    for row in range(300):
        sums[0][row + 1] = sums[0][row] + values[row] * weights[row]
        sums[1][row + 1] = sums[1][row] + weights[row]

    def mean(first, last):
        return (sums[0][last + 1] - sums[0][first]) / (sums[1][last + 1] - sums[1][first])

    for row in range(0, 300, 13):
        expected = max(min(mean(first, last) for last in range(row, 300)) for first in range(row + 1))
        assert pooled[row] == pytest.approx(expected)


def test_falling_values_are_pooled_in_one_pass():
    assert denoise._pool(range(50_000, 0, -1), [1.0] * 50_000) == [(range(50_000), pytest.approx(25_000.5))]
