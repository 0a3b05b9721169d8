import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.strategy.model.batch_norm import least_samples
from lightning_pfo.strategy.step.microbatches import (
    declared_batch_size,
    declared_sizes,
    default_num_microbatches,
    shapes_of,
    too_few_samples,
)


def one_f_one_b_of(num_ranks, num_microbatches):
    return make_schedule("1f1b", num_ranks, num_microbatches)


@pytest.mark.parametrize(
    ("batch_size", "num_stages", "expected"),
    [
        (64, 4, 16),
        (24, 4, 12),  # a divisor is near
        (34, 4, 17),
        (4, 4, 4),
        (7, 2, 7),
        (8, 1, 1),
        (37, 4, 16),  # a prime: unequal microbatches
        (13, 1, 1),
        (58, 4, 29),
        (118, 4, 16),  # 2 and 59 are too far
        (6, 4, 6),  # fewer samples than four per rank
    ],
)
def test_default_number_of_microbatches(batch_size, num_stages, expected):
    assert default_num_microbatches(batch_size, num_stages, partial(one_f_one_b_of, num_stages)) == expected


def test_the_default_number_is_one_that_the_schedule_can_run():
    def in_threes(num_microbatches):
        if num_microbatches % 3:
            raise ConfigurationError(f"a multiple of 3; got {num_microbatches}")

    assert default_num_microbatches(20, 3, in_threes) == 12  # of which none divides 20
    assert default_num_microbatches(30, 3, in_threes) == 6  # rather than 12, as it divides 30
    assert default_num_microbatches(4, 3, in_threes) == 3


@pytest.mark.parametrize(("batch_size", "expected"), [(8, 4), (16, 8), (12, 6), (10, 5), (6, 3), (3, 2), (1, 2)])
def test_batch_norms_have_two_samples_in_a_microbatch_where_batches_have_so_many(batch_size, expected):
    make_schedule = partial(one_f_one_b_of, 2)
    found = default_num_microbatches(batch_size, 2, make_schedule, least_samples(nn.Sequential(nn.BatchNorm1d(2))))
    assert found == expected
    assert least_samples(nn.Sequential(nn.BatchNorm1d(2).eval())) == least_samples(nn.Linear(2, 2)) == 1


def test_a_batch_smaller_than_the_pipeline_is_a_short_one():
    assert default_num_microbatches(3, 4, partial(one_f_one_b_of, 4)) == 4
    assert default_num_microbatches(3, 4, partial(one_f_one_b_of, 4), 2) == 4
    assert default_num_microbatches(1, 2, partial(one_f_one_b_of, 2)) == 2
    assert re.match(r"A batch of 1 sample is too small.*Use batches of 8 samples", too_few_samples(1, 2, 2))
    assert not too_few_samples(2, 2, 2)


def test_a_schedule_that_can_run_no_number_is_told_of():
    def none(num_microbatches):
        raise ConfigurationError("Use another schedule.")

    with pytest.raises(BatchError, match=r"batch of 3 samples cannot be divided.*Use another schedule.*batches of 16"):
        default_num_microbatches(3, 4, none)


def test_loaders_say_how_many_samples_batches_may_have():
    data = TensorDataset(torch.zeros(21, 1))
    assert declared_sizes(DataLoader(data, batch_size=8)) == {8, 5}
    assert declared_sizes([DataLoader(data, batch_size=7), DataLoader(data, batch_size=None), range(3)]) == {7}
    assert declared_sizes(None) == declared_sizes([]) == set()


def test_batch_sizes_are_known_before_training_unless_loaders_make_batches_by_themselves():
    data = TensorDataset(torch.zeros(21, 1))

    class Stream(IterableDataset):
        def __iter__(self):
            yield from range(3)

    assert declared_batch_size([DataLoader(data, batch_size=8)]) == 8
    assert declared_batch_size({"a": DataLoader(Stream(), batch_size=4), "b": DataLoader(data, batch_size=2)}) == 4
    without = (range(3), DataLoader(data, batch_size=None), DataLoader(data, collate_fn=lambda items: items[0]))
    assert declared_batch_size(without) is None
    assert declared_batch_size([*without, DataLoader(data, batch_size=3)]) == 3


def test_shapes_are_told_of_nested_tensors_too():
    rows = [torch.zeros(2, 3), torch.zeros(1, 3)]
    nested = torch.nested.nested_tensor(rows)
    assert shapes_of([torch.zeros(2, dtype=torch.int64), nested]) == "int64[2], float32[[2, 3], [1, 3]]"
