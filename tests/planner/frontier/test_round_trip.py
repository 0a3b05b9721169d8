"""What we write we read: frontiers of noisy profiles come back from their files, and every selection finds its plan."""

import re
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_pfo.core.errors import PlanError
from lightning_pfo.planner import InstructionProfile, Profile, load_frontier, plan_frontier, save_frontier, select_plan

CLOCKS_MHZ = (1410, 1200, 1005, 795, 600)


def noisy(physical, seed, noise):
    """A profile measured with so much noise: points out of order, some dominated, some energies below the valley."""
    random = np.random.default_rng(seed)
    instructions = {}
    for key, line in physical.instructions.items():
        times, energies = (
            tuple((np.array(values) * random.normal(1.0, noise, len(values)).clip(0.5, 2.0)).tolist())
            for values in (line.times_s, line.energies_j)
        )
        instructions[key] = InstructionProfile(line.clocks_mhz, times, energies, line.p2p_blocking_powers_w)
    return Profile(instructions)


def every_form(frontier):
    """Selections of all forms, limits as they are printed in tables, files and messages."""
    yield from ("fastest", "least_energy", "least_edp", *range(len(frontier.plans)))
    num_gpus = frontier.schedule.num_ranks * frontier.profile.gpus_per_stage
    for plan in frontier.plans:
        yield from (f"{plan.iteration_time_s!r}s", f"T'={plan.iteration_time_s!r}s")
        yield f"{plan.iteration_time_s / frontier.baseline.iteration_time_s!r}x"
        yield f"{plan.iteration_energy_j / plan.iteration_time_s / num_gpus!r}W"
    for too_little in ("0.00001s", "0.00001x", "0.00001W"):
        with pytest.raises(PlanError) as refusal:
            select_plan(frontier, too_little)
        for number, unit in re.findall(r"from ([0-9.]+) ([sW])", str(refusal.value)):
            yield f"{number}{unit}"


def check(frontier):
    with tempfile.TemporaryDirectory() as folder:
        save_frontier(frontier, Path(folder))
        loaded = load_frontier(folder)
    assert loaded == frontier
    for plan in frontier.straggler_plans:
        assert select_plan(loaded, f"T'={plan.iteration_time_s!r}s") == plan
    for selection in every_form(frontier):
        assert frontier.number_of(select_plan(frontier, selection)) == loaded.number_of(select_plan(loaded, selection))
    for plan in frontier.plans:
        assert 0 <= plan.lower_bound_j <= plan.iteration_energy_j
        # Its own limit selects a plan or one as good.
        assert select_plan(frontier, f"{plan.iteration_time_s!r}s").iteration_energy_j <= plan.iteration_energy_j


@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([("1f1b", 2, 6), ("1f1b", 3, 4), ("gpipe", 3, 4), ("envpipe", 4, 8), ("looped_bfs", 4, 4)]),
    seed=st.integers(0, 2**32),
    noise=st.sampled_from([0.0, 0.01, 0.2]),
    power=st.sampled_from([0, 70.38, {1410: 90, 1200: 70, 600: 50}, {1410: 71.3, 1005: 66.1, 600: 66.1}]),
)
@example(("envpipe", 8, 8), 0, 0.1, 70.38)
def test_frontiers_come_back_from_their_files(make_profile, shape, seed, noise, power):
    schedule, num_stages, num_microbatches = shape
    profile = noisy(make_profile(np.random.default_rng(seed).uniform(0.01, 0.05, num_stages), CLOCKS_MHZ), seed, noise)
    check(
        plan_frontier(
            profile,
            schedule=schedule,
            num_microbatches=num_microbatches,
            p2p_blocking_power_w=power,
            num_plans=10,
            num_straggler_plans=3,
        )
    )


@settings(deadline=None, max_examples=12)
@given(
    shape=st.sampled_from([("1f1b", 2, 4), ("gpipe", 2, 3), ("envpipe", 3, 3)]),
    seed=st.integers(0, 2**32),
    power=st.sampled_from([70.38, {1410: 90, 1200: 70, 600: 50}]),
    limits=st.sampled_from([{"switch_latency_s": 0.01}, {"least_dwell_s": 0.05}, {"change_cost_j": 1.0}]),
)
def test_frontiers_with_limits_come_back_from_their_files(make_profile, shape, seed, power, limits):
    schedule, num_stages, num_microbatches = shape
    profile = noisy(make_profile(np.random.default_rng(seed).uniform(0.01, 0.05, num_stages), CLOCKS_MHZ), seed, 0.02)
    frontier = plan_frontier(
        profile,
        schedule=schedule,
        num_microbatches=num_microbatches,
        p2p_blocking_power_w=power,
        num_plans=5,
        **limits,
    )
    if frontier.plans:
        check(frontier)


@pytest.mark.parametrize("num_microbatches", [2, 4, 8])
def test_a_frontier_of_a_run_whose_bound_lay_above_its_energy_comes_back(num_microbatches):
    path = Path(__file__).parent / "bound_above_energy.csv"
    check(plan_frontier(path, num_microbatches=num_microbatches))


@pytest.mark.parametrize(("num_stages", "power"), [(1, 85.3), (2, 85.3), (2, 0)])
def test_energies_of_zero_are_no_less_than_zero_for_rounding(make_profile, tmp_path, num_stages, power):
    """A single rank never waits, so that its plans need nothing; sums of effective energies leave 1e-14 J."""
    for seed in range(8):
        profile = make_profile(np.random.default_rng(seed).uniform(0.01, 0.05, num_stages), CLOCKS_MHZ)
        none = Profile({key: replace(one, energies_j=(0.0,) * 5) for key, one in profile.instructions.items()})
        frontier = plan_frontier(none, num_microbatches=6, p2p_blocking_power_w=power)
        if num_stages == 1 or power == 0:  # nobody gains by a slower plan
            assert [plan.iteration_energy_j for plan in frontier.plans] == [0.0]
        save_frontier(frontier, tmp_path)
        assert load_frontier(tmp_path) == frontier
