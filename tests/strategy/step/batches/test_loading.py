"""Batches that the first of three ranks loads for all, against batches that all load."""

from pathlib import Path

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

CASES = ("shuffled, augmented", "stream", "workers", "resumed")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loading")
    run_script(Path(__file__).parents[2] / "scripts" / "loading.py", folder)
    return of_ranks(folder, 3)


@pytest.mark.parametrize("case", CASES)
def test_losses_batches_and_random_numbers_are_those_of_ranks_that_all_load(ranks, case):
    for seen in ranks:
        by_all, by_first = seen[case]["all"], seen[case]["first"]
        assert len(by_all["seen"]) > 5
        assert 5 in [size for _, size, _ in by_first["batches"]]  # the last one is short
        for what in ("seen", "batches", "draws"):
            assert by_first[what] == by_all[what]


@pytest.mark.parametrize("case", CASES)
def test_other_ranks_ask_no_dataset(ranks, case):
    assert ranks[0][case]["first"]["calls"] == ranks[0][case]["all"]["calls"] > 0
    assert [seen[case]["first"]["calls"] for seen in ranks[1:]] == [0, 0]
    assert all(seen[case]["all"]["calls"] for seen in ranks)


def test_an_error_of_the_loader_is_everybodys(ranks):
    assert ranks[0]["error"] == "ValueError: an image is broken"
    for seen in ranks[1:]:
        assert seen["error"].startswith("BatchError: The first rank loads batches for the others")
        assert seen["error"].endswith("ValueError: an image is broken")


def test_the_number_of_microbatches_is_chosen_by_what_the_loader_yields(ranks):
    """Not by its `batch_size`, where a `collate_fn` makes batches of another size."""
    for seen in ranks:
        for chosen, given in seen["collated"]:
            assert chosen[0] == given[0] == 6
            assert len(chosen) == 5
            assert chosen == pytest.approx(given, abs=1e-6)


@pytest.mark.parametrize("case", ["in order", "workers", "stream"])
def test_predictions_and_the_samples_they_are_of_are_those_of_ranks_that_all_load(ranks, case):
    writes = 2 if case == "workers" else 0
    for rank, seen in enumerate(ranks):
        by_all, by_first = seen["predict"][case]["all"], seen["predict"][case]["first"]
        assert by_first["written"] == by_all["written"]
        assert len(by_all["written"]) == (8 if rank == writes else 0)  # three batches and an epoch, twice
        assert by_first["indices"] == by_all["indices"] == [[] if case == "stream" else [3, 4]]
        assert by_first["unknown"] == by_all["unknown"] == (case == "stream" and rank == 0)
        if case != "workers":  # which count for themselves
            assert by_all["calls"] == 16
            assert by_first["calls"] == (16 if rank == 0 else 0)
    if case != "stream":
        batches = [[5, 2, 7], [0, 1, 6], [3, 4]]
        written = ranks[writes]["predict"][case]["first"]["written"]
        assert [indices for indices, _ in written] == [*batches, [batches]] * 2


def test_who_loads_is_one_of_two():
    with pytest.raises(ConfigurationError, match=r"load_batches is 'all' or 'first'; got 'needed'"):
        PfoPipelineStrategy(load_batches="needed")
