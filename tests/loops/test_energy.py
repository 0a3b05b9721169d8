"""The plain listeners in an Accelerate loop: profiling, planning, and training under the plan."""

import csv
import json
from pathlib import Path

import pytest

from lightning_pfo.planner import load_frontier
from tests.launch import of_ranks, run_script

SCRIPT = Path(__file__).parent / "scripts" / "energy.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("energy")
    run_script(SCRIPT, folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    return of_ranks(folder, 2)


def test_listeners_do_not_change_training(ranks):
    for seen in ranks:
        plain = seen["plain"]
        assert len(plain) == 6
        assert seen["profiled"][:6] == seen["top"]["losses"] == seen["plan"]["losses"] == plain


def test_the_profile_covers_all_instructions(folder):
    rows = list(csv.DictReader((folder / "profile.csv").open()))
    assert {(row["stage"], row["instruction"]) for row in rows} == {
        (s, i) for s in "01" for i in ("forward", "backward")
    }
    assert {row["frequency"] for row in rows} == {"1410", "1110", "810", "510", "210"}
    assert all(int(row["samples"]) == 2 * 4 for row in rows)


def test_the_plan_needs_less_energy_than_the_top_clocks_as_predicted(folder, ranks):
    assert ranks[0]["plan"]["measured"] == ranks[1]["plan"]["measured"]
    frontier = load_frontier(folder / "plans")
    for name, plan in (("top", frontier.baseline), ("plan", frontier.least_energy)):
        measured = ranks[0][name]["measured"]
        assert [m[0] for m in measured] == [1, 2, 3, 4, 5]  # the first iteration counts work
        energies_j = [m[2] for m in measured[1:]]  # clocks land in the one before
        # clock changes take 5 ms to land and activations some time to arrive, which is not predicted
        assert energies_j == pytest.approx([plan.iteration_energy_j] * 4, rel=0.05)
    assert ranks[0]["plan"]["measured"][-1][2] < 0.9 * ranks[0]["top"]["measured"][-1][2]


def test_clocks_are_restored(ranks):
    assert all(seen[name]["restored"] for seen in ranks for name in ("plan", "top"))


def test_a_plan_that_does_not_fit_is_refused_on_every_rank(ranks):
    for seen in ranks:
        kind, message = seen["unfit"]
        assert kind == "PlanMismatchError"
        assert "num_microbatches=4" in message


def test_one_run_measures_plans_and_verifies(folder, ranks):
    for seen in ranks:
        run = seen["one_run"]
        assert run["losses"][:6] == seen["plain"]
        assert run["restored"]
        assert run["summary"] == ranks[0]["one_run"]["summary"]
    summary = ranks[0]["one_run"]["summary"]
    assert summary["saving_percent"] > 5
    assert abs(summary["slowdown_percent"]) < 0.2
    report = json.loads((folder / "one_run" / "report.json").read_text())
    assert report["saving_percent"] == summary["saving_percent"]
    assert load_frontier(folder / "one_run" / "plans").plans
