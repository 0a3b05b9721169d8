"""Metrics of a user's own classes come to what one device has, however their states are reduced."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "own_metrics.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own_metrics")
    run_script(SCRIPT, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("plain_0", "two_0", "two_1")}


@pytest.mark.parametrize("what", ["seen", "epoch"])
@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_what_is_computed_and_logged_is_that_of_one_device(runs, rank, what):
    assert len(runs["plain_0"][what]) >= 7
    check(runs[rank][what], runs["plain_0"][what], what)


def test_nothing_is_said_to_be_another(runs):
    assert runs["two_0"]["said"] == runs["two_1"]["said"] == []
