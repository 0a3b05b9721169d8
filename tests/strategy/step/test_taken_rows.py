"""First and last rows of a batch, of which microbatches may have fewer than a step takes: as on one device."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "taken_rows.py"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("taken_rows")
    said = run_script(SCRIPT, folder).stdout
    runs = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("plain_0", "two_0", "two_1")}
    return runs | {"said": said}


@pytest.mark.parametrize("rank", ["two_0", "two_1"])
def test_a_step_keeps_and_returns_the_rows_it_takes_of_the_batch(found, rank):
    check(found[rank]["batches"], found["plain_0"]["batches"], "batches")


def test_a_logger_is_given_the_rows_of_the_batch(found):
    check(found["two_0"]["shown"], found["plain_0"]["shown"], "shown")


def test_nobody_is_warned_of_them(found):
    assert "put together" not in found["said"]
