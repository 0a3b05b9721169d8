"""Wherever metrics are, and whenever they were made or copied, hooks compute on every rank what one device says."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "metrics_anywhere.py"
COPIED = ("Cloned", "ClonedLate", "ClonedCollection", "Tracked", "MadeInHook")
HELD = ("InDict", "InList", "InObject", "InVariable", "Variable", "OfLayers", "Counts", "CountsInAttribute")
LOGGED = ("LoggedFromDict", "LoggedFromVariable")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    run_script(SCRIPT, folder, timeout_s=120)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", [*COPIED, *HELD, *LOGGED, "FailsToCompute", "OfCallback"])
def test_every_rank_computes_what_one_device_does(seen, case, rank):
    alone = seen[f"{case}_1_0"]
    assert len(set(alone)) > 1 or "Count" in case or case == "OfCallback"
    assert seen[f"{case}_2_{rank}"] == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("case", ["InDict", "Counts", "CountsInAttribute"])
@pytest.mark.parametrize("settings", ["interleaved_1f1b", "gpipe_batch"])
def test_runs_of_earlier_stages_do_not_count(seen, case, rank, settings):
    assert seen[f"{case}_2_{rank}_{settings}"] == pytest.approx(seen[f"{case}_1_0"], abs=2e-5)
