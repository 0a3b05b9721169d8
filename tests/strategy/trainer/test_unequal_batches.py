"""Replicas with other numbers of batches, and of samples in them, do not wait for each other, as under DDP."""

from pathlib import Path

import pytest
import torch

from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unequal_batches")
    run_script(Path(__file__).parents[1] / "scripts" / "unequal_batches.py", folder)
    return of_ranks(folder, 4)


def test_a_replica_without_a_further_batch_predicts_what_one_device_does(ranks):
    batches = [[[0, 2, 4], [6]], [[1, 3, 5]]]  # 7 samples for two replicas, in batches of 3
    for rank, seen in enumerate(ranks):
        own = batches[rank // 2]
        assert [len(part) for part in seen["predict"]["parts"]] == [len(part) for part in own]
        for part, samples in zip(seen["predict"]["parts"], own, strict=True):
            assert part == pytest.approx([seen["expected"][sample] for sample in samples], abs=1e-6)
        assert seen["predict"]["written"] == ([*own, [own]] if rank % 2 == 0 else [])


@pytest.mark.parametrize("name", ["validate", "test", "fit"])
def test_users_may_distribute_other_numbers_of_batches(ranks, name):
    losses = ranks[0]["expected"]
    loss = (sum(losses[:6]) + sum(losses[:2])) / 8
    sanity_check = ([0, 1], [0]) if name == "fit" else ([], [])
    for rank, seen in enumerate(ranks):
        own = [[0, 1, 2], [0]][rank // 2]
        assert seen[name]["seen"] == [*sanity_check[rank // 2], *own]
        assert seen[name]["loss"] == pytest.approx(loss, abs=1e-6)


def test_each_of_several_loaders_may_have_other_numbers_of_batches(ranks):
    losses = ranks[0]["expected"]
    loss = (sum(losses[:6]) + sum(losses[:2])) / 8
    for rank, seen in enumerate(ranks):
        assert seen["two loaders"]["seen"] == [[0, 1, 2, 0], [0, 0, 1, 2]][rank // 2]
        expected = {f"loss_epoch/dataloader_idx_{loader}": pytest.approx(loss, abs=1e-6) for loader in range(2)}
        assert seen["two loaders"]["losses"] == expected


@pytest.mark.parametrize("fully_shard", ["False", "zero3"])
def test_replicas_may_have_batches_of_other_numbers_of_microbatches(ranks, fully_shard):
    if fully_shard != "False" and torch.__version__ < OLDEST_FSDP["cpu"]:
        pytest.skip("this torch keeps replicas whole")
    for seen in ranks:
        gaps = seen["trained"][fully_shard]
        assert len(gaps) >= 6
        assert max(gaps) < 1e-5


@pytest.mark.parametrize("fully_shard", ["False", "zero3"])
def test_what_one_replica_logs_from_a_later_batch_on_is_looked_at(ranks, fully_shard):
    if fully_shard != "False" and torch.__version__ < OLDEST_FSDP["cpu"]:
        pytest.skip("this torch keeps replicas whole")
    for found, expected in [pair for seen in ranks[2:] for pair in seen["late"][fully_shard]]:
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")
def test_replicas_that_compute_layers_together_are_told_to_have_equal_numbers(ranks):
    assert all("so all evaluate the same number of batches" in seen["divided"] for seen in ranks)


def test_a_replica_without_any_batch_predicts_nothing(ranks):
    for rank, seen in enumerate(ranks):
        expected = [pytest.approx(seen["expected"][:2], abs=1e-6)] if rank < 2 else []
        assert seen["none"]["predict"] == expected


def test_a_replica_without_any_batch_is_named_where_others_would_wait_for_it(ranks):
    for seen in ranks:
        assert "each has a batch of every loader; here one has none" in seen["none"]["test"]
        if torch.__version__ >= OLDEST_FSDP["cpu"]:
            assert "so all evaluate the same number of batches" in seen["none"]["divided"]


@pytest.mark.parametrize("name", ["test", "predict"])
@pytest.mark.parametrize(("at", "last"), [("0 1", 1), ("3 0", 0), ("1 2", 2)])
def test_all_ranks_end_after_the_batch_in_which_any_is_asked_to(ranks, name, at, last):
    for rank, seen in enumerate(ranks):
        ended = seen["ended"][f"{name} {at}"]
        assert ended["seen"] == list(range(last + 1 if rank < 2 else 1))
        assert ended["raised"] == (last < 2)  # after the last one there is nothing to leave out
