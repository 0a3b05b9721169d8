"""torchmetrics objects that hooks compute: on every rank what one device says, however often they are asked."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "metrics.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    run_script(SCRIPT, folder)  # ranks that remember other values would wait for one another
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", ["Computes_2_0", "Computes_2_1"])
def test_hooks_compute_what_one_device_does(runs, rank):
    alone = runs["Computes_1_0"]["seen"]
    assert len(alone) == 2 * (4 * 2 + 3 + 1) + 2  # and the sanity check, and what the progress bar shows
    assert runs[rank]["seen"] == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("rank", ["Aggregates_2_0", "Aggregates_2_1"])
def test_what_adds_up_numbers_is_told_once_for_a_batch(runs, rank):
    """Of a loss the mean, of what is counted the sum, of what is largest the largest, and rows joined."""
    alone = runs["Aggregates_1_0"]["seen"]
    assert len(alone) > 2 * 4 * 4
    assert runs[rank]["seen"] == pytest.approx(alone, abs=2e-5)


@pytest.mark.parametrize("rank", ["Says_2_0", "Says_2_1"])
def test_what_metrics_say_of_a_batch_is_what_they_say_on_one_device(runs, rank):
    """Also of states that are put together otherwise than by a sum, and of all that aggregators were told so far."""
    alone = runs["Says_1_0"]["seen"]
    assert len(alone) > 2 * 4 * 20
    assert runs[rank]["seen"] == pytest.approx(alone, abs=2e-5, nan_ok=True)
    assert not runs[rank]["warned"]


@pytest.mark.parametrize("rank", ["MakesOf_2_0", "MakesOf_2_1"])
def test_numbers_that_are_made_of_what_metrics_say_are_those_of_one_device(runs, rank):
    """A quotient of two, in percent, what is left of it, a perplexity; logged, kept in a list or set."""
    alone = runs["MakesOf_1_0"]["seen"]
    assert len(alone) == 2 * 4 * (8 + 2)
    assert runs[rank]["seen"] == pytest.approx(alone, abs=2e-5)
    assert not runs[rank]["warned"]


@pytest.mark.parametrize("rank", ["Keeps_2_0", "Keeps_2_1"])
def test_counts_that_a_step_keeps_in_lists_are_those_of_one_device(runs, rank):
    """Also where a batch adds nothing, and of sums and calls where each microbatch has one sample."""
    alone = runs["Keeps_1_0"]["seen"]
    hits = alone[3:-2:2]
    assert 2 < len(set(hits)) < len(hits) == 2 * 4
    assert runs[rank]["seen"] == pytest.approx(alone, abs=2e-5)
    assert not runs[rank]["warned"]


def test_the_first_rank_warns_of_what_was_never_updated_alone(runs):
    assert len(runs["Computes_1_0"]["told"]) == 1
    assert runs["Computes_2_0"]["told"] == runs["Computes_1_0"]["told"]
