"""Loaders of several sizes train together as on one device."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "several_loaders.py"


def test_batches_of_several_sizes_side_by_side_train_as_on_one_device(tmp_path):
    run_script(SCRIPT, tmp_path, timeout_s=60)
    alone, *ranks = (json.loads((tmp_path / f"{run}.json").read_text()) for run in ("1_0", "2_0", "2_1"))
    assert len(alone) == 10
    for losses in ranks:
        assert losses == pytest.approx(alone, abs=2e-5)
