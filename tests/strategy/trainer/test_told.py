"""What users are told of their hooks: norms that are those of one rank."""

import json
import re
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "told.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    run_script(SCRIPT, folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("1_0", "2_0", "2_1")}


@pytest.mark.parametrize(
    ("case", "name"),
    [("OfLightning", "grad_norm"), ("OfTorch", "clip_grad_norm_"), ("ByHand", "on_after_backward")],
)
def test_a_norm_of_one_ranks_gradients_is_named_once_with_its_line(said, case, name):
    for rank in ("2_0", "2_1"):
        (text,) = said[rank][case]
        assert re.match(rf"{name} \(.*told\.py, line \d+\).*trainer\.strategy\.grad_norm\(\)", text)
        assert ("gradient_clip_val" in text) == (case == "OfTorch")
    assert said["1_0"][case] == []


def test_nothing_is_said_of_optimizers_and_of_norms_over_all_stages(said):
    assert [found["ByItself"] for found in said.values()] == [[], [], []]
