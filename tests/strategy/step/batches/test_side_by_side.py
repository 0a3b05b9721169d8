"""Batches of several loaders side by side: every microbatch has the same share of each part."""

import pytest
import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.step.batches import notices
from lightning_pfo.strategy.step.batches.batching import Batching


@pytest.fixture
def batching(monkeypatch):
    monkeypatch.setattr(notices, "_said", set())
    return Batching(has_several_loaders=lambda: True)


def batch_of(**sizes):
    return {name: [torch.arange(size), torch.zeros(size, 2)] for name, size in sizes.items()}


def shapes(microbatches):
    return [tuple(len(part[name][0]) for name in part) for part in microbatches]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 24), [(2, 6)] * 4),
        ((8, 6), [(4, 3)] * 2),
        ((8, 5), [(8, 5)]),
        ((8, 1), [(8, 1)]),
        ((7, 7), [(2, 2), (2, 2), (2, 2), (1, 1)]),
    ],
)
def test_parts_are_divided_into_equal_shares(batching, sizes, expected):
    batch = batch_of(few=sizes[0], many=sizes[1])
    microbatches = batching.split(batch, 4)
    assert shapes(microbatches) == expected
    assert microbatches.size == batching.size_of(batch, is_divided=True) == sizes[0]
    for name, parts in batch.items():
        assert torch.equal(torch.cat([part[name][0] for part in microbatches]), parts[0])


def test_fewer_microbatches_are_told_of_once(batching, caplog):
    for _ in range(2):
        batching.split(batch_of(a=8, b=5), 4)
    (record,) = caplog.records
    assert (
        "(batch['a'] 8 and batch['b'] 5 samples), which are divided into 1 microbatch in place of 4" in record.message
    )


def test_the_first_microbatches_are_of_all_parts(batching):
    batch = batch_of(a=4, b=8)
    joined = batching.first_parts(batch, batching.split(batch, 4), 3)
    assert [len(part[0]) for part in joined.values()] == [3, 6]


def test_a_loader_that_has_ended_has_no_share(batching):
    batch = {**batch_of(a=4, b=8), "c": None}
    assert [part["c"] for part in batching.split(batch, 2)] == [None, None]


def test_a_part_without_samples_is_given_to_all(batching):
    assert [part["c"] for part in batching.split({**batch_of(a=4, b=4), "c": 0.5}, 2)] == [0.5, 0.5]


def test_sizes_that_contradict_each_other_within_a_part_are_refused(batching):
    batch = {"a": [torch.zeros(8), torch.zeros(5)], "b": [torch.zeros(8)]}
    with pytest.raises(BatchError, match="which must be the same for all"):
        batching.split(batch, 4)


def test_so_are_those_of_one_loader():
    with pytest.raises(BatchError, match="which must be the same for all"):
        Batching().split(batch_of(a=8, b=5), 4)
