"""Checkpoints have what those of one device have: what hooks follow in buffers, and modules among hyperparameters."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("what_is_saved")
    run_script(Path(__file__).parents[1] / "scripts" / "what_is_saved.py", folder)
    return json.loads((folder / "plain.json").read_text()), of_ranks(folder, 2)[0]


def are_equal(seen, expected):
    assert set(seen) == set(expected)
    for name, values in expected.items():
        assert seen[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("when", [0, 1], ids=["saved", "resumed"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_averages_that_a_hook_follows_in_buffers_are_those_of_one_device(found, kind, when):
    plain, first = found
    are_equal(first[kind][when]["whole"], plain[when]["averages"])
    if kind == "full":
        are_equal(first[kind][when]["averages"], plain[when]["averages"])


def test_another_phase_finds_what_training_has_left(found):
    plain, first = found
    expected = plain[2]
    for kind in ("full", "sharded"):
        assert first["later"][kind]["values"][0] == pytest.approx(expected["values"][0], rel=1e-5)
    are_equal(first["later"]["full"]["averages"], expected["averages"])


@pytest.mark.parametrize("when", [0, 1], ids=["saved", "resumed"])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_network_among_hyperparameters_is_saved_as_a_whole(found, kind, when):
    plain, first = found
    seen = first[kind][when]
    are_equal(seen["net"], plain[when]["net"])
    if kind == "full":
        are_equal(seen["loaded"], plain[when]["loaded"])
    assert seen["loss"] == "MSELoss"
    assert not seen["knows_us"]


def test_a_whole_module_knows_nothing_of_how_it_was_divided(found):
    assert found[1]["notes"] == []
