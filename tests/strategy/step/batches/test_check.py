import copy
import pickle
from collections import UserDict
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchFeature

from lightning_pfo.strategy.step.batches.check import checksum, sample_of


def test_other_order_values_and_shapes_have_other_checksums():
    x = torch.arange(12.0).reshape(4, 3)
    batch = [x, {"y": torch.tensor([1, 0, 1, 0])}]
    others = [
        [x.flip(0), batch[1]],
        [x, {"y": torch.tensor([0, 1, 0, 1])}],
        [x[:2], {"y": torch.tensor([1, 0])}],
        [x.reshape(6, 2), batch[1]],
        [x + 1e-6, batch[1]],
    ]
    assert len({checksum(b) for b in [batch, *others]}) == 6
    assert checksum([x.clone(), {"y": batch[1]["y"].clone()}]) == checksum(batch)


@given(st.permutations(range(16)))
def test_permuted_samples_are_noticed(order):
    x = torch.arange(16.0) ** 2
    assert (checksum(x[list(order)]) == checksum(x)) == (list(order) == sorted(order))


def test_not_a_number_does_not_hide_differences():
    assert checksum(torch.tensor([float("nan"), 1.0])) != checksum(torch.tensor([float("nan"), 2.0]))


@pytest.mark.parametrize("made", [UserDict, dict, lambda items: SimpleNamespace(**items)])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.arange(3), torch.tensor([0, 2, 1])),
        (np.arange(3), np.array([0, 2, 1])),
        (["a", "b", "c"], ["a", "c", "b"]),
        (pandas.Series([1, 2, 3]), pandas.Series([1, 3, 2])),
        (torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse()),
    ],
)
def test_all_kinds_of_batches_are_looked_into(made, one, other):
    first, second = (made({"x": torch.zeros(3), "values": values}) for values in (one, other))
    assert checksum(first) != checksum(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex128, torch.bool])
def test_every_element_counts(dtype):
    batch = torch.zeros((1 << 24) + 3 if dtype is torch.float32 else 1000, dtype=dtype)
    before = checksum(batch)
    batch[-2] = True
    assert checksum(batch) != before


def test_the_last_bit_of_large_numbers_counts():
    first, second = torch.tensor([2**60, 1]), torch.tensor([2**60 + 1, 1])
    assert checksum(first) != checksum(second)
    assert checksum(torch.tensor([3e38])) != checksum(torch.nextafter(torch.tensor([3e38]), torch.tensor([0.0])))
    assert checksum(torch.tensor([1j])) != checksum(torch.tensor([2j]))
    assert checksum(2**60) != checksum(2**60 + 1)
    assert checksum(np.array(["a", "b"])) != checksum(np.array(["a", "c"]))
    assert checksum({"x": torch.ones(2)}) != checksum({"y": torch.ones(2)})


def test_what_holds_nothing_does_not_count():
    features = BatchFeature({"x": torch.ones(2, 3), "mask": None})
    sent = pickle.loads(pickle.dumps(features))
    assert vars(sent).keys() != vars(features).keys()
    assert checksum(sent) == checksum(features) != checksum(BatchFeature({"x": torch.zeros(2, 3), "mask": None}))


@pytest.mark.parametrize(
    "batch",
    [
        torch.randn(100_000),
        torch.randn(7, 3, dtype=torch.bfloat16),
        torch.zeros(1000, dtype=torch.bool),
        [{"ids": torch.arange(5)}, "text"],
        {"x": np.zeros((40, 40)), "n": 3},
        UserDict(x=torch.tensor(2.0)),
    ],
)
def test_a_sample_tells_batches_apart_that_are_altogether_others(batch):
    def other(value):
        if isinstance(value, (list, tuple)):
            return [other(each) for each in value]
        if isinstance(value, (dict, UserDict)):
            return {key: other(each) for key, each in value.items()}
        return f"{value} too" if isinstance(value, str) else value + 1

    assert sample_of(batch) == sample_of(copy.deepcopy(batch)) != sample_of(other(batch))


@pytest.mark.parametrize(
    "batch",
    [
        torch.empty(0, 3),
        torch.ones(4, 4).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        None,
        object(),
    ],
)
def test_of_anything_there_is_a_sample(batch):
    assert sample_of([batch, torch.ones(2)]) != sample_of([batch, torch.zeros(2)])
