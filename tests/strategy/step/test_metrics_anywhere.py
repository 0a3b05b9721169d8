"""Wherever metrics are, and whenever they were made or copied, hooks compute on every rank what one device says."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "metrics_anywhere.py"
COPIED = ("Cloned", "ClonedLate", "ClonedCollection", "Tracked", "MadeInHook")
HELD = (
    "InDict",
    "InList",
    "InObject",
    "InVariable",
    "Variable",
    "OfLayers",
    "Counts",
    "CountsInAttribute",
    "OfEarlyLayer",
)
LOGGED = ("LoggedFromDict", "LoggedFromVariable", "LoggedForEpochs", "InLongEpochs")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each rank has seen, and what was printed."""
    folder = tmp_path_factory.mktemp("metrics")
    output = run_script(SCRIPT, folder).stdout
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}, output


@pytest.fixture(scope="module")
def seen(ran):
    return ran[0]


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


def test_what_is_logged_for_epochs_only_is_not_warned_of(ran):
    assert "median" not in ran[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_adds_metrics_is_refused_by_name(seen, rank):
    assert "so it adds no metrics; this one has added 'tracker." in seen[f"refused_{rank}"]
    assert "Add it in a hook" in seen[f"refused_{rank}"]
