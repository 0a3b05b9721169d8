"""What all ranks call together in a script after `fit` says which of them has failed; one launch."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "after_fit.py"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("after_fit")
    run_script(SCRIPT, folder, expect_success=False)
    return json.loads((folder / "rank_0.json").read_text())


def test_each_call_names_the_rank_that_has_ended_and_its_error(seen):
    assert len(seen) == 10
    assert seen.pop("reduce") == 3.0
    for name, said in seen.items():
        assert said.startswith("RankDiedError: rank 1 (pid "), (name, said)
        assert "has ended with ValueError: the second rank's own mistake." in said
