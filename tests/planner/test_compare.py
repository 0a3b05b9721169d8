"""Everybody's plans side by side."""

from dataclasses import replace

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.schedules.in_flight import peak_in_flight
from lightning_pfo.planner import compare, load_frontier, plan_frontier, save_frontier, select_plan, simulate
from lightning_pfo.planner.policies.registry import LISTED_POLICIES


@pytest.fixture(scope="module")
def comparison(make_profile):
    return compare(make_profile([0.020, 0.024, 0.021, 0.028]), num_microbatches=8, p2p_blocking_power_w=70, num_plans=6)


def test_every_policy_has_its_row_and_ours_is_the_last(comparison):
    assert {*comparison.policies} == {*LISTED_POLICIES, "ours", "ours_early_forwards"}
    assert [*comparison.policies][-1] == "ours"
    zero = comparison.as_dict()["max_frequency"]
    assert (zero["saving_percent"], zero["slowdown_percent"]) == (0.0, 0.0)
    assert comparison.as_dict()["ours"]["slowdown_percent"] <= 1e-6


def test_figures_can_be_recomputed_and_nobody_is_below_the_bound(comparison, make_profile):
    profile = make_profile([0.020, 0.024, 0.021, 0.028])
    top = comparison.policies["max_frequency"].plan
    for policy in comparison.policies.values():
        timeline = simulate(profile, policy.plan.schedule, policy.plan.clocks_mhz, [70.0] * 4)
        row = policy.as_dict()
        assert row["iteration_time_s"] == pytest.approx(timeline.iteration_time_s)
        assert row["iteration_energy_j"] == pytest.approx(timeline.iteration_energy_j)
        assert row["saving_percent"] == pytest.approx(100 * (1 - timeline.iteration_energy_j / top.iteration_energy_j))
        assert row["saving_percent"] <= row["bound_saving_percent_at_this_time"] + 1e-9
        assert row["ours_saving_percent_at_this_time"] <= row["bound_saving_percent_at_this_time"] + 1e-9
        assert policy.ours.iteration_time_s <= policy.plan.iteration_time_s * (1 + 1e-9)
        assert policy.ours.schedule == policy.plan.schedule
        assert row["most_in_flight"] == max(peak_in_flight(policy.plan.schedule))


def test_who_needs_less_than_ours_is_told(comparison):
    """EnvPipe's own order keeps more in memory, and may need less than any plan under 1F1B; in one order nobody."""
    told = {name for name, policy in comparison.policies.items() if comparison.beats_ours(policy)}
    assert told <= {"envpipe_envelope_balanced_early_forwards"}
    ours, early = comparison.policies["ours"], comparison.policies["envpipe_envelope_balanced_early_forwards"]
    needs_less = early.plan.iteration_energy_j < ours.plan.iteration_energy_j
    is_no_slower = early.plan.iteration_time_s <= ours.plan.iteration_time_s * (1 + 1e-9)
    assert bool(told) == (needs_less and is_no_slower)
    assert early.most_in_flight > ours.most_in_flight


def test_a_policy_of_your_own_that_is_better_than_ours_is_told(make_profile):
    """With an effort that finds little, and a policy that knows the best plan."""
    profile, settings = make_profile([0.02, 0.03]), {"num_microbatches": 4, "p2p_blocking_power_w": 70, "num_plans": 4}
    best = plan_frontier(profile, effort="best", **settings)

    def oracle(problem, deadline_s=None):
        return best.least_energy.clocks_mhz

    both = compare(profile, policies=[oracle, "ours"], **settings)
    assert [*both.policies] == ["oracle", "ours"]
    oracles = both.policies["oracle"]
    assert oracles.plan.clocks_mhz == best.least_energy.clocks_mhz
    worse = replace(oracles.ours, iteration_energy_j=1.01 * oracles.plan.iteration_energy_j)
    beaten = replace(oracles, ours=worse)
    assert beaten.beats_ours_percent == pytest.approx(100 * (1 - 1 / 1.01))
    assert both.beats_ours(beaten)
    assert not both.beats_ours(oracles)


def test_all_policies_are_compared_under_the_same_conditions(make_profile):
    profile = make_profile([0.02, 0.03])
    with pytest.raises(ConfigurationError, match=r"policies=.* says which.*; got policy='perseus'"):
        compare(profile, num_microbatches=4, p2p_blocking_power_w=70, policy="perseus")
    with pytest.raises(ConfigurationError, match=r"policy is one of ours, max_frequency, .*; got 'zeus_globl'\."):
        compare(profile, num_microbatches=4, p2p_blocking_power_w=70, policies=["zeus_globl"])
    gpipe = compare(profile, num_microbatches=4, p2p_blocking_power_w=70, schedule="gpipe", num_plans=3)
    assert not any(name.endswith("early_forwards") for name in gpipe.policies)


@pytest.mark.parametrize("name", ["perseus", "zeus_per_stage", "envpipe_uniform_default", "top_clocks", "envpipe"])
def test_frontiers_of_policies_are_frontiers(name, profile, tmp_path):
    frontier = plan_frontier(profile, num_microbatches=6, policy=name, num_plans=6, switch_latency_s=0.004)
    save_frontier(frontier, tmp_path)
    assert load_frontier(tmp_path) == frontier
    own = select_plan(frontier, "own")
    assert own is frontier.own_choice
    assert own.iteration_energy_j >= own.lower_bound_j > 0.5 * own.iteration_energy_j
    # What the policy did not reckon with it suffers.
    late = simulate(profile, frontier.schedule, own.clocks_mhz, [70.0] * 4, switch_latency_s=0.004)
    assert (own.iteration_time_s, own.iteration_energy_j) == (late.iteration_time_s, late.iteration_energy_j)


def test_the_planners_own_choice_is_no_slowdown(frontier):
    assert select_plan(frontier, "own") is select_plan(frontier, "no_slowdown")


@pytest.mark.parametrize("setting", [{"deadlines_s": [0.5]}, {"least_dwell_s": 0.01}, {"change_cost_j": 1.0}])
def test_other_policies_know_no_limits(profile, setting):
    with pytest.raises(ConfigurationError, match="are for the planner's own plans; policy=perseus knows none of them"):
        plan_frontier(profile, num_microbatches=4, policy="perseus", **setting)
