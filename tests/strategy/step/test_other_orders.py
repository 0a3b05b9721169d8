"""Ranks whose steps go another way round, as over sets of texts: what they send each other is the same."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other_orders")
    run_script(Path(__file__).parents[1] / "scripts" / "other_orders.py", folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


@pytest.mark.parametrize("case", ["Own", "Operations", "Alike", "Modules", "Heads"])
@pytest.mark.parametrize("rank", ["2_0", "2_1"])
def test_training_is_that_of_one_device(found, case, rank):
    assert len(found["1_0"][case][0]) == 3
    check(found[rank][case], found["1_0"][case], case)


def test_layers_of_stages_in_another_order_are_refused_on_all_ranks(found):
    for rank in ("2_0", "2_1"):
        assert "divide a step alike, but here they do not" in found[rank]["Towers"]
