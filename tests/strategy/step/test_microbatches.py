from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pfo.core.errors import BatchError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.strategy.step.microbatches import (
    batch_size_of,
    default_num_microbatches,
    evaluation_num_microbatches,
    merge_outputs,
    split_batch,
    training_batch_sizes,
)


def one_f_one_b_of(num_ranks, num_microbatches):
    return make_schedule("1f1b", num_ranks, num_microbatches)


Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "all"


def test_every_kind_of_batch_is_split():
    x = torch.arange(8).reshape(4, 2)
    batch = {
        "tensor": x,
        "pair": Pair(x, [x + 1, (x + 2,)]),
        "text": ["a", "b", "c", "d"],
        "label": "same",
        "scalar": torch.tensor(7),
        "sample": Sample(x),
        "none": None,
    }
    first, second = split_batch(batch, 2)
    assert torch.equal(second["tensor"], x[2:])
    assert isinstance(second["pair"], Pair)
    assert torch.equal(second["pair"].y[1][0], x[2:] + 2)
    assert (first["text"], second["text"]) == (["a", "b"], ["c", "d"])
    assert first["label"] == "same"
    assert int(second["scalar"]) == 7
    assert torch.equal(second["sample"].x, x[2:])
    assert first["none"] is None


@given(st.integers(1, 6), st.integers(1, 6))
def test_splitting_and_merging_gives_the_batch_back(num_microbatches, step):
    x = torch.randn(num_microbatches * step, 3)
    parts = split_batch([x, {"y": x[:, 0]}], num_microbatches)
    merged = merge_outputs(parts)
    assert torch.equal(merged[0], x)
    assert torch.equal(merged[1]["y"], x[:, 0])


def test_scalars_are_averaged_when_merged():
    assert float(merge_outputs([torch.tensor(1.0), torch.tensor(3.0)])) == 2.0
    assert merge_outputs(["a", "b"]) == "b"


def test_batches_that_do_not_divide_are_refused_with_numbers_that_work():
    with pytest.raises(BatchError, match=r"A batch of 10 samples .*num_microbatches=4.* Use num_microbatches=5"):
        split_batch(torch.zeros(10, 2), 4)


def test_a_batch_needs_one_size():
    with pytest.raises(BatchError, match=r"got \[2, 3\]"):
        batch_size_of([torch.zeros(2), torch.zeros(3, 1)])
    with pytest.raises(BatchError, match="got no tensor"):
        batch_size_of({"x": torch.tensor(1), "y": "text"})


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "expected"), [(64, 4, 16), (24, 4, 12), (4, 4, 4), (7, 2, 7), (34, 4, 17), (8, 1, 4)]
)
def test_default_number_of_microbatches(batch_size, num_stages, expected):
    assert default_num_microbatches(batch_size, num_stages, partial(one_f_one_b_of, num_stages)) == expected


def test_a_batch_smaller_than_the_pipeline_is_refused():
    with pytest.raises(
        BatchError, match=r"batch of 3 samples cannot be divided.*Use num_microbatches=4 or more.*a multiple of 16"
    ):
        default_num_microbatches(3, 4, partial(one_f_one_b_of, 4))


@pytest.mark.parametrize(("batch_size", "preferred", "expected"), [(16, 8, 8), (5, 8, 5), (7, 4, 1), (1, 16, 1)])
def test_evaluation_takes_any_batch(batch_size, preferred, expected):
    assert evaluation_num_microbatches(batch_size, preferred) == expected


def test_batch_sizes_are_known_before_training():
    data = TensorDataset(torch.zeros(21, 1))

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(3)

    def sizes(num_batches=float("inf"), **options):
        return training_batch_sizes([DataLoader(data, batch_size=8, **options)], num_batches)

    assert sizes() == [8, 5]
    assert sizes(num_batches=2) == [8]
    assert sizes(drop_last=True) == [8]
    assert sizes(shuffle=True) == [8, 5]
    assert training_batch_sizes(
        [DataLoader(Stream(), batch_size=4), range(3), DataLoader(data, batch_size=None)], 9
    ) == [4]
