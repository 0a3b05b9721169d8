"""How an experiment plans on the profile it has measured."""

from dataclasses import replace

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment.checks import check_settings
from lightning_pfo.experiment.config import ExperimentConfig, PlanConfig, ScheduleConfig
from lightning_pfo.experiment.planning import plan_experiment, plan_others
from lightning_pfo.planner import write_profile


@pytest.mark.parametrize(
    ("leads", "given_s", "expected_s"),
    [(False, None, 0.01), (True, None, 0.0), (True, 0.02, 0.02), (False, 0.0, 0.0)],
)
def test_plans_reckon_with_the_measured_latency_where_clocks_are_not_asked_for_ahead(
    tmp_path, leads, given_s, expected_s
):
    rows = [
        {"stage": stage, "instruction": kind, "frequency": clock, "time": 0.03 * 1400 / clock, "energy": energy_j}
        | {"p2p_blocking_power_w": 80.0, "switch_latency": 0.01}
        for stage in (0, 1)
        for kind in ("forward", "backward")
        for clock, energy_j in ((1400, 9.0), (1200, 8.0), (1000, 7.8))
    ]
    write_profile(tmp_path / "profile.csv", rows)
    config = ExperimentConfig(
        gpu=GpuConfig(lead_clocks=leads),
        plan=PlanConfig(num_plans=3, switch_latency_s=given_s),
        schedule=replace(ScheduleConfig(), num_microbatches=2),
    )
    frontier, _ = plan_experiment(config, tmp_path)
    assert frontier.switch_latency_s == expected_s


def rows_of(num_stages):
    return [
        {"stage": stage, "instruction": kind, "frequency": clock, "time": length * seconds, "energy": length * energy_j}
        | {"p2p_blocking_power_w": 80.0}
        for stage in range(num_stages)
        for kind, length in (("forward", 1), ("backward", 2))
        for clock, seconds, energy_j in ((1400, 0.03, 9.0), (1200, 0.033, 7.0), (1000, 0.038, 6.0))
    ]


@pytest.mark.parametrize(
    ("words", "policy", "schedule"),
    [
        ({}, "envpipe_envelope_balanced", "1f1b"),
        ({"type": "baseline", "scheduling": "ours"}, "envpipe_baseline", "1f1b"),
        ({"type": "uniform", "reconfig": "greedy"}, "envpipe_uniform_greedy", "1f1b"),
        # Backwards take 0.06 s at the top, forwards 0.038 s: 3.2, 1.6 and 0 times.
        ({"scheduling": "ours"}, "envpipe_envelope_balanced_early_forwards", "envpipe:3,1,0"),
        ({"scheduling": "ours", "max_in_flight": 4}, "envpipe_envelope_balanced_early_forwards", "envpipe:1,1,0"),
    ],
)
def test_envpipes_words_make_its_plans(tmp_path, words, policy, schedule):
    write_profile(tmp_path / "profile.csv", rows_of(3))
    config = ExperimentConfig(
        plan=PlanConfig(policy="envpipe", select="own", **words),
        schedule=ScheduleConfig(num_microbatches=6),
    )
    frontier, chosen = plan_experiment(config, tmp_path)
    assert (frontier.policy, frontier.schedule.name) == (policy, schedule)
    assert chosen is frontier.own_choice


def test_other_policies_plan_under_the_order_of_the_training(tmp_path):
    write_profile(tmp_path / "profile.csv", rows_of(3))
    plan = PlanConfig(policy="envpipe", scheduling="ours", select="own", compare=["perseus", "ours"], num_plans=4)
    config = ExperimentConfig(plan=plan, schedule=ScheduleConfig(num_microbatches=6))
    frontier, chosen = plan_experiment(config, tmp_path)
    others = plan_others(config, tmp_path, frontier)
    assert [*others] == ["perseus", "ours"]
    assert {one.schedule for one in others.values()} == {chosen.schedule}
    assert others["ours"].iteration_time_s <= frontier.baseline.iteration_time_s * (1 + 1e-9)
    assert others["ours"].iteration_energy_j <= chosen.iteration_energy_j


def test_beside_a_straggler_slower_plans_are_planned_for(tmp_path):
    write_profile(tmp_path / "profile.csv", rows_of(2))
    config = ExperimentConfig(plan=PlanConfig(select="T'=9x", num_plans=4), schedule=ScheduleConfig(num_microbatches=4))
    frontier, chosen = plan_experiment(config, tmp_path)
    assert chosen is [*frontier.plans, *frontier.straggler_plans][-1]


@pytest.mark.parametrize(
    ("words", "schedule", "message"),
    [
        ({"policy": "ours", "compare": ["perseuss"]}, "1f1b", "Did you mean perseus"),
        ({"policy": "ours", "compare": ["perseus", "perseus"]}, "1f1b", "names each policy once.* got perseus beside"),
        ({"policy": "ours", "compare": ["top_clocks"]}, "1f1b", "without the top clocks"),
        ({"select": "own", "compare": ["envpipe_envelope_balanced"]}, "1f1b", "names each policy once"),
        (
            {"policy": "ours", "compare": ["envpipe_envelope_balanced_early_forwards"]},
            *("1f1b", r"A training has one order.* plan.compare=\[ours\]"),
        ),
        ({"policy": "ours", "auto": True, "compare": ["perseus"]}, "1f1b", "got plan.compare=.* Leave that out"),
        ({"policy": "ours", "online": True}, "1f1b", "Use plan=envpipe_envelope plan.online=true"),
        (
            {"select": "own", "reconfig": "default", "online": True},
            "1f1b",
            "got plan.policy=envpipe, .*reconfig=default",
        ),
        ({"select": "own", "online": True, "threshold_scale": 0.0}, "1f1b", "plan.threshold_scale is above 0; got 0"),
        ({"reconfig": "balancd"}, "1f1b", "Did you mean balanced"),
        ({"scheduling": "ours"}, "gpipe", "early forwards .* got schedule 'gpipe'"),
        ({"policy": "zeus"}, "1f1b", "policy is one of ours, .*got 'zeus'"),
        ({"policy": "perseus"}, "1f1b", "may all be slower than the top clocks.* Use plan.select=own"),
    ],
)
def test_what_a_policy_cannot_do_is_said_before_anything_is_measured(words, schedule, message):
    plan = PlanConfig(**{"policy": "envpipe", **words})
    with pytest.raises(ConfigurationError, match=message):
        check_settings(ExperimentConfig(plan=plan, schedule=ScheduleConfig(schedule)))
