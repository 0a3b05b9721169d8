"""Steps that return None before they call the model skip their batch, as on one device."""

import json
from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script
from tests.thorough import mostly

pytestmark = pytest.mark.slow

OPTIONS_OF = {
    "EverySecond": mostly(("1f1b", "whole"), "interleaved"),
    "First": mostly(("1f1b", "interleaved"), "whole"),
    "All": mostly(("1f1b",), "interleaved", "whole"),
    "NoneBatches": ("1f1b",),
}
STEPS = [(kind, options) for kind, of_kind in OPTIONS_OF.items() for options in of_kind]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipping")
    script = Path(__file__).parents[1] / "scripts" / "skipping.py"
    options = json.dumps({**OPTIONS_OF, "NoBatches": ["1f1b"]})
    run_script(script, folder, options, expect_success=False)  # its last case ends a rank
    return of_ranks(folder, 2)


@pytest.mark.parametrize(("kind", "options"), STEPS)
def test_batches_are_skipped_as_on_one_device(ranks, kind, options):
    expected = ranks[0][f"{kind}, plain"]
    assert None in expected["losses"]
    for seen in ranks:
        found = seen[f"{kind}, {options}"]
        assert [loss is None for loss in found["losses"]] == [loss is None for loss in expected["losses"]]
        trained = [(a, b) for a, b in zip(found["losses"], expected["losses"], strict=True) if b is not None]
        assert all(a == pytest.approx(b, rel=1e-5) for a, b in trained)
        assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
        for same in ("logged", "count", "error", "begun"):  # the look at the first batch does not count
            assert found[same] == expected[same]


def test_a_loader_without_batches_trains_nothing_as_on_one_device(ranks):
    for seen in ranks:
        assert {**seen["NoBatches, 1f1b"], "begun": 0} == {**ranks[0]["NoBatches, plain"], "begun": 0}


def test_a_step_that_skips_some_microbatches_is_refused_on_all_ranks(ranks):
    for seen in ranks:
        assert "got None for 3 of 4" in seen["SomeMicrobatches"]["error"]


def test_a_step_that_skips_on_one_rank_is_refused_there(ranks):
    error = ranks[0]["OfOneRank"]["error"]
    assert "have skipped microbatches [[0, 1, 2, 3]], and the last stage []" in error


def test_another_strategy_says_how_to_get_the_whole_module(ranks):
    error = ranks[0]["split before"]["error"]
    assert error.startswith("ConfigurationError: A module that a pipeline has split")
    assert "trainer.strategy.gather_module() on every rank" in error
