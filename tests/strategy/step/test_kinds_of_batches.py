"""Batches of all kinds, of other shapes one after the other, train as on one device."""

import json
from pathlib import Path

import pytest

from tests.comparing import check
from tests.launch import run_script

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[1] / "scripts" / "kinds_of_batches.py"
KINDS = (
    *("object in object", "dict in object", "slots", "arrays", "packed", "packed, in object", "nested", "jagged"),
    *("graphs", "images", "tables", "sparse", "feature", "size beside", "flat", "collated"),
    *(f"{kind}, loaded by the first" for kind in ("feature", "packed, in object", "arrays")),
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kinds_of_batches")
    run_script(SCRIPT, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_device(seen, kind):
    assert len(seen["plain_0"][kind]) >= 2
    for rank in ("two_0", "two_1"):
        check(seen[rank][kind], seen["plain_0"][kind], kind)


def test_before_training_a_batch_that_is_not_divided_is_looked_at_whole(seen):
    assert seen["two_0"]["ended early"] == seen["two_1"]["ended early"] == []
