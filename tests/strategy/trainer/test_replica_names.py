"""Replicas of which each logs names that the other does not: each has its own values, on all ranks alike."""

from pathlib import Path

import pytest

from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow
EXPECTED = {
    "other names": {"odd": 1000, "even": 1, "odd_step": 1000, "even_step": 1, "odd_epoch": 1000, "even_epoch": 1},
    "missing": {"odd": 1000},
    "once": {"five": 5},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replica_names")
    run_script(Path(__file__).parents[1] / "scripts" / "replica_names.py", folder)
    return of_ranks(folder, 4)


@pytest.mark.parametrize("case", EXPECTED)
def test_names_of_one_replica_have_its_values_on_all(found, case):
    means = [rank[case].pop("mean") for rank in found]
    loss = sum(means) / 4
    for rank in found:
        assert rank[case].pop("loss") == pytest.approx(loss, rel=1e-5)
        kept = {name: rank[case].pop(name) for name in ("most of odd", "sum of even") if name in rank[case]}
        assert rank[case] == EXPECTED[case]
        if kept:
            assert kept["most of odd"] == 4


def test_an_evaluation_reduces_names_of_one_replica_with_its_values(found):
    expected = {"of odd": 1000, "of even": 1, "both": 1.5, "most": 4, "accuracy": 1, "count": 4, "least": 0}
    for metrics in (metrics for rank in found for metrics in rank["validation"]):
        assert metrics.pop("alone", 2) == 2  # logged by a hook, of its own rank
        assert metrics.pop("count_epoch") == 4
        assert metrics == expected


def test_a_mean_over_replicas_is_not_there_within_the_step_and_says_so(found):
    for rank in found:
        number, text = rank["read"]
        assert number == 2  # of the first batch, where it is that of the replica, and that of the hook
        assert "the mean over the replicas when the batch is done" in text
        assert "on_train_batch_end" in text
