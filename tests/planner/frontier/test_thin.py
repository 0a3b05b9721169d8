from dataclasses import replace

import pytest

from lightning_pfo.cli import main
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.planner import load_frontier, save_frontier, thin_frontier


def test_every_nth_plan_stays_and_the_ends_do(frontier):
    plans = frontier.plans
    thinned = thin_frontier(frontier, every=4)
    assert thinned.plans == tuple(dict.fromkeys((*plans[::4], plans[-1])))
    assert thinned.number_of(plans[-1]) == 0
    assert thin_frontier(frontier) == frontier
    kept = thin_frontier(frontier, every=100, keep=[plans[3]])
    assert kept.plans == (plans[0], plans[3], plans[-1])


@pytest.mark.parametrize("num_plans", range(2, 14))
def test_a_number_of_plans_is_spread_over_times(frontier, num_plans):
    plans = thin_frontier(frontier, num_plans=num_plans).plans
    assert plans[0] == frontier.fastest
    assert plans[-1] == frontier.least_energy
    assert len(plans) <= num_plans
    assert len(plans) >= min(num_plans, len(frontier.plans)) - 3


def test_the_command_writes_a_frontier_of_its_own(frontier, tmp_path, capsys):
    save_frontier(frontier, tmp_path / "all")
    arguments = [f"frontier={tmp_path / 'all'}", f"output_dir={tmp_path / 'few'}"]
    assert main(["sample", *arguments, "num_plans=3"]) == 0
    assert f"3 of {len(frontier.plans)} plans" in capsys.readouterr().out
    assert load_frontier(tmp_path / "few") == thin_frontier(frontier, num_plans=3)
    assert len(list((tmp_path / "few").glob("freqs_pipeline_*.py"))) == 3
    assert main(["sample", *arguments, "every=0"]) == 2
    assert "every must be at least 1" in capsys.readouterr().err


def test_ends_stay_where_times_are_equal(frontier):
    one_time = tuple(replace(plan, iteration_time_s=1.0) for plan in frontier.plans)
    thinned = thin_frontier(replace(frontier, plans=one_time), num_plans=2)
    assert thinned.plans == (one_time[0], one_time[-1])
    single = replace(frontier, plans=frontier.plans[:1])
    assert thin_frontier(single, num_plans=2) == single
    assert thin_frontier(frontier, num_plans=10_000) == frontier


@pytest.mark.parametrize(
    "numbers",
    [{"every": 0}, {"every": True}, {"every": 2.5}, {"every": "2"}, {"every": None}, {"num_plans": 1},
     {"num_plans": 10**7}, {"num_plans": 3.0}, {"num_plans": "3"}],
)  # fmt: skip
def test_numbers_out_of_range_are_errors(frontier, numbers):
    with pytest.raises(ConfigurationError, match="every must be at least 1 and num_plans at least 2"):
        thin_frontier(frontier, **numbers)
