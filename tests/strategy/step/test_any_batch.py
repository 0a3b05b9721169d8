"""Batches of odd sizes, and losses that are means over something else, are trained on as on one device."""

from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "any_batch.py"


@pytest.mark.slow
def test_losses_are_those_of_one_device():
    said = run_script(SCRIPT).stdout
    whole = [f"whole, {loss}" for loss in ("two views", "correlations", "queue", "weighted sum")]
    for case in (
        "samples",
        "found labels",
        "tokens",
        "function",
        "sum",
        "time first",
        "split by the user",
        *whole,
        "deferred",
    ):
        assert f"\n{case}\n" in f"\n{said}"
