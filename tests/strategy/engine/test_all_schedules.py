"""Every schedule trains, validates and predicts like one device, and executes what it declares."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "all_schedules.py"
ORDER = """# both input gradients first
0F0, 0F1, 0I0, 0I1, 0W0, 0W1
1F0, 1I0, 1F1, 1I1, 1W1, 1W0
"""
NAMES = {
    "1f1b": 2,
    "gpipe": 2,
    "interleaved_1f1b": 4,
    "interleaved_1f1b x 3": 6,
    "looped_bfs": 4,
    "interleaved_zero_bubble": 4,
    "zbv": 4,
    "dualpipev": 4,
    "envpipe": 2,
    "envpipe:1,0": 2,
    "file": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("schedules")
    (folder / "order.txt").write_text(ORDER)
    run_script(SCRIPT, folder)
    names = ("single", "rank_0", "rank_1")
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_results_are_those_of_one_device(runs, name):
    for rank in ("rank_0", "rank_1"):
        for key in ("train", "val", "lr", "predictions"):
            assert runs[rank][name][key] == pytest.approx(runs["single"][key], abs=2e-5), key
        assert runs[rank][name]["num_stages"] == NAMES[name]
    assert len(runs["single"]["train"]) == 4


@pytest.mark.parametrize("name", NAMES)
def test_what_is_executed_is_what_was_declared(runs, name):
    for rank in ("rank_0", "rank_1"):
        seen = runs[rank][name]
        assert seen["begun"] == seen["ended"] == 4 * seen["planned"]


def test_a_trainer_makes_no_groups_that_there_are(runs):
    for rank in ("rank_0", "rank_1"):
        numbers = [runs[rank][name]["num_groups"] for name in NAMES]
        assert numbers[0] == 2  # the world, and a rank alone
        assert max(numbers) == 4  # and one for each direction
