"""Loaders of several sizes train together as on one device."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "several_loaders.py"


def test_batches_of_several_sizes_side_by_side_and_lists_of_pictures_train_as_on_one_device(tmp_path):
    output = run_script(SCRIPT, tmp_path).stdout
    alone, *ranks = (json.loads((tmp_path / f"{run}.json").read_text()) for run in ("1_0", "2_0", "2_1"))
    assert (len(alone["both"]), len(alone["pictures"])) == (10, 14)  # with validation, and a sanity check
    for found in ranks:
        assert found["both"] == pytest.approx(alone["both"], abs=2e-5)
        assert found["pictures"] == pytest.approx(alone["pictures"], abs=2e-5)
    assert "is taken for" not in output
