"""A copy of layers that a hook makes has the weights of its time, and runs where these are."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "copies.py"
CASES = ("AtFitStart", "EachEpoch", "EachBatch", "Average", "Twice", "WholeModule", "Called")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copies")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("case", CASES)
def test_they_train_as_on_one_device(runs, case):
    expected, first, second = (runs[name][case] for name in ("1_0", "2_0", "2_1"))
    for found in (first, second):
        assert len(found["seen"]) == len(expected["seen"]) >= 6
        for values, like in zip(found["seen"], expected["seen"], strict=True):
            assert values == pytest.approx(like, rel=2e-5, abs=1e-7)
        assert not found["forward"]  # nothing of the pipeline is left in them
    assert first["sums"] == pytest.approx(expected["sums"], rel=2e-5)


def test_a_whole_module_has_the_weights_that_layers_of_all_ranks_made_before_their_last_call(runs):
    expected, found = runs["1_0"]["OlderNorms"], runs["2_0"]["OlderNorms"]
    assert found["sums"] == pytest.approx(expected["sums"], rel=2e-5)


def test_a_step_that_copies_is_refused_with_a_way_out(runs):
    for name in ("2_0", "2_1"):
        assert "A step makes a copy of 'net." in runs[name]["Within"]["error"]
        assert "on_train_batch_start" in runs[name]["Within"]["error"]


def test_a_copy_that_stages_cannot_run_one_after_the_other_is_refused_with_a_way_out(runs):
    for name in ("2_0", "2_1"):
        assert "The step calls a copy of 'net.0'" in runs[name]["LeadsBack"]["error"]
        assert "Copy the layers in __init__" in runs[name]["LeadsBack"]["error"]
