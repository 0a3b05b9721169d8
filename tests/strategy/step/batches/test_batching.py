"""How batches of fewer samples than others are divided."""

import pytest
import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.step.batches.batching import Batching, ShortBatches


def sizes(of, *batches, kind="train", number=4):
    return [of.split(kind, torch.zeros(size, 2), number).sizes for size in batches]


def test_microbatches_of_short_batches_have_two_samples_where_others_have():
    found = sizes(ShortBatches(Batching()), 8, 7, 6, 5, 4, 3, 2, 1)
    assert found == [(2, 2, 2, 2), (3, 2, 2), (2, 2, 2), (3, 2), (2, 2), (3,), (2,), (1,)]


def test_of_larger_batches_none_is_larger_than_others():
    of = ShortBatches(Batching())
    assert sizes(of, 20, 9, 5) == [(5, 5, 5, 5), (3, 2, 2, 2), (3, 2)]


@pytest.mark.parametrize(("size", "asked"), [(4, (1, 1, 1, 1)), (6, (2, 2, 1, 1))])
def test_where_others_have_single_samples_too_a_batch_is_divided_as_was_asked(size, asked):
    assert sizes(ShortBatches(Batching()), size, 3) == [asked, (1, 1, 1)]


def test_what_a_loader_says_of_its_batches_does_not_count_before_there_was_one():
    assert sizes(ShortBatches(Batching(expected=lambda: {8})), 4) == [(1, 1, 1, 1)]


def test_batches_of_an_evaluation_say_nothing_of_training():
    of = ShortBatches(Batching())
    assert sizes(of, 64, kind="validation") == [(16,) * 4]
    assert sizes(of, 4) == [(1, 1, 1, 1)]


def test_what_users_divide_stays_as_they_divide_it():
    of = ShortBatches(Batching(split_batch=lambda batch, number: batch.split(-(-len(batch) // number))))
    assert sizes(of, 8, 3) == [(2, 2, 2, 2), (1, 1, 1)]


def test_nobody_need_know_the_size_of_a_batch_that_is_not_divided():
    contradicting = (torch.zeros(4), torch.zeros(6, 3))
    assert Batching().size_of(contradicting, is_divided=False) == 1
    with pytest.raises(BatchError, match="must be the same for all"):
        Batching().size_of(contradicting, is_divided=True)
