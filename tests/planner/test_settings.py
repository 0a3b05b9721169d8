import dataclasses
import inspect

import pytest
from omegaconf import OmegaConf

from lightning_pfo.cli.plan import Settings
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.experiment.config import PlanConfig
from lightning_pfo.planner import PlanSettings, plan_frontier

NAMES = {entry.name for entry in dataclasses.fields(PlanSettings)}


@pytest.mark.parametrize("schema", [Settings, PlanConfig])
def test_command_line_and_hydra_take_every_setting_with_the_same_default(schema):
    composed = OmegaConf.structured(schema)
    for name, default in vars(PlanSettings()).items():
        if name != "select":  # of the command line it depends on the policy
            assert composed[name] == default


def test_python_names_none_of_them_again():
    assert not NAMES & set(inspect.signature(plan_frontier).parameters)


def test_every_setting_says_what_it_is_for():
    assert all(entry.metadata["help"] for entry in dataclasses.fields(PlanSettings))
    assert all(f"{name}:" in PlanSettings.__doc__ for name in NAMES)


def test_settings_and_changes_are_the_same(profile):
    given = plan_frontier(profile, PlanSettings(num_plans=5), num_microbatches=4)
    assert given == plan_frontier(profile, num_microbatches=4, num_plans=5)
    assert len(plan_frontier(profile, PlanSettings(num_plans=5), num_microbatches=4, num_plans=2).plans) == 2


def test_a_change_of_no_setting_names_the_one_meant(profile):
    with pytest.raises(ConfigurationError, match=r"no setting 'num_plan' of a plan\. Did you mean num_plans"):
        plan_frontier(profile, num_microbatches=4, num_plan=5)


def test_an_effort_that_is_not_known_names_those_that_are(profile):
    message = r"effort is one of fast, default, best; got 'bets'\. Did you mean best"
    with pytest.raises(ConfigurationError, match=message):
        plan_frontier(profile, num_microbatches=4, effort="bets")


def test_more_effort_comes_no_farther_from_the_bound(profile):
    gaps = {
        effort: plan_frontier(profile, num_microbatches=8, num_plans=8, effort=effort) for effort in ("fast", "best")
    }
    largest = {effort: max(plan.gap for plan in frontier.plans) for effort, frontier in gaps.items()}
    assert largest["best"] <= largest["fast"]
