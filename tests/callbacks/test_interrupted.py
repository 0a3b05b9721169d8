"""A run that is killed in each state, one after the other, and goes on: from its file, from a checkpoint, from both."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parent / "scripts" / "interrupted.py"
PARTS = {  # name: state in which it is killed, and what it goes on from
    "warm_up": ("WarmUp", ""),
    "measure": ("Measure", "file, checkpoint"),
    "plan": ("Plan", "checkpoint"),
    "verify": ("Verify", "file"),
    "hold": ("Hold", "file, checkpoint"),
    "last": ("end", "checkpoint"),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What each part has written, with what was kept on disk when it was killed."""
    folder = tmp_path_factory.mktemp("interrupted")
    kept, found = folder / "pfo" / "optimizer.json", {}
    run_script(SCRIPT, folder, "plain", "none", "")
    found["plain"] = json.loads((folder / "plain.json").read_text())
    for name, (state, source) in PARTS.items():
        if source == "checkpoint":
            kept.unlink()
        from_checkpoint = "yes" if "checkpoint" in source else "no"
        ended = run_script(SCRIPT, folder, name, state, from_checkpoint, expect_success=state == "end")
        assert ended.returncode == (0 if state == "end" else -9), ended.stdout
        found[name] = json.loads((folder / f"{name}.json").read_text()) | {"kept": json.loads(kept.read_text())}
    return found


def test_each_was_killed_in_its_state(parts):
    for name, (state, _) in PARTS.items():
        assert parts[name]["state"] == state.replace("end", "Hold"), parts[name]["notes"]


def test_no_measurement_is_lost(parts):
    names = list(PARTS)
    for earlier, later in pairwise(names):
        assert parts[later]["recalled"] == parts[earlier]["cells"], later
    for name in names:
        on_disk = {
            f"{row['stage']} {row['instruction']} {row['frequency']}": [row["time"], row["energy"], row["samples"]]
            for row in parts[name]["kept"]["rows"]
        }
        assert on_disk == parts[name]["cells"], name
    assert parts["measure"]["cells"]


def test_none_is_measured_twice(parts):
    measured = [cell for name in PARTS for cell in parts[name]["measured"]]
    assert len(set(measured)) == len(measured)
    assert set(measured) == parts["last"]["cells"].keys()


def test_losses_are_those_of_a_run_that_was_never_interrupted_and_measures_nothing(parts):
    plain = parts["plain"]
    for name, (_, source) in PARTS.items():
        first, losses = parts[name]["first_step"], parts[name]["losses"]
        assert (first > 0) == ("checkpoint" in source)
        assert len(losses) > 0
        assert losses == plain[first : first + len(losses)], name
