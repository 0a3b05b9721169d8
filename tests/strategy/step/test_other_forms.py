"""What is known of one batch, loader or epoch is not applied to other things that a step returns, logs or keeps."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "other_forms.py"
BY_BATCH = (*("dict, arrays", "a list, rows", "lists, arrays", "floats, a list", "means, rows", "rows, means"),)
BY_LOADER = ("rows, columns", "count, index", "index, count", "lists, floats", "floats, lists")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other_forms")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", ["two_0", "two_1"])
@pytest.mark.parametrize(
    "case",
    [
        *(f"by batch: {case}" for case in BY_BATCH),
        *(f"by loader: {case}" for case in BY_LOADER),
        *("logs", "trains", "batch sizes"),
    ],
)
def test_other_forms_come_out_as_on_one_device(seen, case, rank):
    assert seen["plain_0"][case]
    check(seen[rank][case], seen["plain_0"][case], case)


def test_what_is_said_in_other_batches_has_other_rules(seen):
    expected = seen["plain_0"]["says"]
    assert len(expected) == 10
    assert seen["two_0"]["says"] == expected
