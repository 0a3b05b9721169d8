"""Many replicas beside stragglers, recomputed replica by replica."""

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.pictures.cluster import draw_emulation
from lightning_pfo.planner import emulate, plan_frontier, select_plan

SETTINGS = {"num_microbatches": 4, "p2p_blocking_power_w": 70, "num_plans": 8}
POLICIES = ["ours", "perseus", "envpipe_uniform_default", "zeus_global", "max_frequency"]


def one_by_one(frontier, factors, reacts):
    """Times and energies of the moments, with loops."""
    own, blocking_w = select_plan(frontier, "own"), 70 * frontier.schedule.num_ranks
    times, energies = [], []
    for moment in factors:
        end_s = max(factor * own.iteration_time_s for factor in moment)
        times.append(end_s)
        energies.append(0.0)
        for factor in moment:
            plans = [own, *((*frontier.plans, *frontier.straggler_plans) if reacts else ())]
            ready = [plan for plan in plans if factor * plan.iteration_time_s <= end_s * (1 + 1e-9)]
            energies[-1] += min(
                plan.iteration_energy_j + blocking_w * (end_s - plan.iteration_time_s) for plan in ready
            )
    return times, energies


def test_figures_are_those_of_each_replica_by_itself(make_profile):
    profile = make_profile([0.020, 0.026])
    factors = [[1.0, 1.0, 1.0], [1.0, 1.07, 1.2], [1.5, 1.0, 1.0]]
    done = emulate(profile, num_pipelines=3, stragglers=factors, policy=POLICIES, **SETTINGS)
    assert [*done.policies] == POLICIES
    for name, policy in done.policies.items():
        frontier = plan_frontier(profile, policy=name, num_straggler_plans=8, **SETTINGS)
        times, energies = one_by_one(frontier, factors, reacts=name in ("ours", "perseus"))
        assert policy.times_s.tolist() == pytest.approx(times)
        assert policy.energies_j.tolist() == pytest.approx(energies)
        top_j = one_by_one(plan_frontier(profile, policy="max_frequency", **SETTINGS), factors, reacts=False)[1]
        assert done.as_dict()[name]["saving_percent"] == pytest.approx(100 * (1 - sum(energies) / sum(top_j)))
    # A slow plan makes the job slower: nothing is clamped.
    assert done.slowdown_percent("envpipe_uniform_default") > 1
    assert done.slowdown_percent("ours") == pytest.approx(0, abs=1e-6)
    assert done.saving_percent("ours") > done.saving_percent("max_frequency") == 0


def test_a_thousand_replicas_over_a_day_and_their_picture(make_profile, tmp_path):
    done = emulate(make_profile([0.020, 0.026]), num_pipelines=1000, stragglers="day", policy="ours", **SETTINGS)
    assert done.factors.shape == (288, 1000)
    assert done.description == "1,000 pipelines of 2 x 4"
    assert done.policies["ours"].reacts
    draw_emulation(done, tmp_path / "day.png")
    assert (tmp_path / "day.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_pipelines": 0}, "num_pipelines is a whole number between 1"),
        ({"policy": []}, "at least one; got none"),
        ({"policy": "perseuss"}, "Did you mean perseus"),
        ({"stragglers": "hot"}, "stragglers are none"),
    ],
)
def test_what_cannot_be_emulated_is_refused(profile, wrong, message):
    with pytest.raises(ConfigurationError, match=message):
        emulate(profile, **{"num_pipelines": 2, **SETTINGS, **wrong})
