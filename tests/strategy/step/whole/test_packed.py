"""Losses of the whole batch behind recurrent layers on packed sequences: those of one device."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    run_script(Path(__file__).parents[2] / "scripts" / "packed.py", folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


@pytest.mark.parametrize("case", ["Padded", "LastStates"])
@pytest.mark.parametrize("rank", ["2_0", "2_1"])
def test_sequences_that_are_padded_again_have_the_losses_of_one_device(found, case, rank):
    assert len(found["1_0"][case]) == 3
    for ours, expected in zip(found[rank][case], found["1_0"][case], strict=True):
        assert ours == pytest.approx(expected, rel=2e-5)


def test_what_cannot_be_joined_says_how_it_could_be(found):
    for rank in ("2_0", "2_1"):
        assert "total_length=" in found[rank]["Longest"]
        assert "Put them back into a tensor that has all samples" in found[rank]["Packed"]
