"""Lists that a step uses as queues: each microbatch would find all of it, so they are told of."""

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects import attributes
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.merge import Merge, queue_keeps


@pytest.mark.parametrize(
    ("items", "before", "expected"),
    [
        ("bcd", "abc", 2),
        ("cde", "abc", 1),
        ("cd", "abc", 1),
        ("abcd", "abc", 0),
        ("bc", "abc", 0),
        ("xyz", "abc", 0),
        ("bad", "abc", 0),
        ("", "abc", 0),
        ("a", "", 0),
    ],
)
def test_a_queue_has_lost_its_first_items_and_goes_on(items, before, expected):
    assert queue_keeps(list(items), 1, list(before)) == expected


@pytest.mark.parametrize(("value", "before", "expected"), [([2, 3], [6, 2], 0), ([5, 2, 3], [6, 5, 2], 2)])
def test_a_number_that_was_the_last_before_makes_no_queue(value, before, expected):
    assert queue_keeps(value, 2, before) == expected


@pytest.mark.parametrize("kind", [torch.tensor, np.array])
@pytest.mark.parametrize("before", [[3, 2, 2], [3.0, 2.0, 2.0]])
def test_a_count_that_looks_like_a_row_in_front_makes_no_queue(before, kind):
    rules = Rules()
    merge = Merge((1, 1), (0.5, 0.5), rules)
    one_more = torch.tensor([0, 1, 0]).to(torch.tensor(before).dtype)
    rules.learn("self.counts as it grows", *[one_more] * 5)  # as a trace tells of any batch
    after = kind([before[0], before[1] + 1, before[2]])
    assert merge.values([after, after], kind(before), "self.counts").tolist() == [3, 3, 2]


def test_lists_of_counters_go_on_as_tensors_do():
    merge = Merge((2, 1), (2 / 3, 1 / 3))
    assert merge.values([[4, 0, 2], [3, 0, 3]], [3, 0, 2], "self.totals") == [4, 0, 3]
    assert merge.values([([4, 0], [2, 1]), ([3, 1], [2, 0])], ([3, 0], [2, 0]), "self.confusion") == ([4, 1], [2, 1])
    assert merge.values([[1.5, 2.0], [3.5, 2.0]], [0.5, 2.0], "self.means") == pytest.approx([2.5 - 1 / 3, 2.0])
    assert merge.values([[4, 1], [5]], [3, 1], "self.items") == [4, 1, 5]  # of other lengths
    rules = Rules()
    rules.learn("self.items", [1, 2], [3], [1, 2], [1, 2, 3])
    assert Merge((2, 2), (0.5, 0.5), rules).values([[4, 2], [5, 6]], [3, 1], "self.items") == [4, 2, 5, 6]


def test_lists_of_tuples_go_on_whoever_has_made_these_anew():
    def pairs(*numbers):
        return [(number, (str(number),)) for number in numbers]

    texts = {text: text for text in "123456"}  # one object for each, as those that a step has kept
    before, *values = (
        [(number, (texts[text],)) for number, (text,) in pairs(*numbers)]
        for numbers in [(1, 2), (1, 2, 3, 4), (1, 2, 5, 6)]
    )
    assert Merge((2, 2), (0.5, 0.5)).values(values, before, "self.rows") == pairs(1, 2, 3, 4, 5, 6)
    assert queue_keeps(values[0][1:], 2, before) == 1


def rows(*numbers):
    return torch.tensor(numbers).repeat(2, 1).T


@pytest.mark.parametrize("kind", [lambda tensor: tensor, lambda tensor: tensor.numpy()])
@pytest.mark.parametrize(
    ("value", "before", "expected"),
    [
        (rows(2, 3, 4, 5), rows(0, 1, 2, 3), 2),
        (rows(0, 0, 4, 5), rows(0, 0, 0, 0), 2),
        (rows(3, 4, 5), rows(0, 1, 2, 3), 1),  # it was longer than it gets
        (rows(1, 2, 3, 4, 5), rows(0, 1, 2, 3), 3),  # it had room left
        (rows(0, 1, 2, 3), rows(0, 1, 2, 3), 0),
        (rows(0, 0, 0, 0), rows(0, 0, 0, 0), 0),
        (rows(1, 2, 3, 4), rows(0, 1, 2, 3), 0),  # a row, and there are two samples
        (rows(4, 5), rows(0, 1, 2, 3), 0),
        (torch.tensor([2, 3, 4, 5]), torch.tensor([0, 1, 2, 3]), 2),
        (torch.tensor([1, 1, 0, 0]), torch.tensor([1, 1, 1, 1]), 0),  # a mask
        (rows(2, 3, 4, 5).float(), rows(0, 1, 2, 3), 0),
    ],
)
def test_a_queue_of_rows_has_one_for_each_sample(value, before, expected, kind):
    assert queue_keeps(kind(value), 2, kind(before)) == expected


def test_microbatches_of_a_queue_leave_what_the_batch_would():
    merge = Merge((2, 1), (2 / 3, 1 / 3))
    before = rows(0, 1, 2, 3)
    merged = merge.values([rows(2, 3, 4, 5), rows(1, 2, 3, 6)], before, "self.queue")
    assert torch.equal(merged, rows(3, 4, 5, 6))
    merged = merge.values([rows(5, 4, 0, 1).numpy(), rows(6, 0, 1, 2).numpy()], before.numpy(), "self.queue")
    assert torch.equal(torch.from_numpy(merged), rows(5, 4, 6, 0))  # the latest first
    items = [object() for _ in range(7)]
    merged = merge.values([[*items[2:4], *items[4:6]], [*items[1:4], items[6]]], items[:4], "self.bank")
    assert all(map(lambda one, other: one is other, merged, items[3:]))


@pytest.mark.parametrize(("num_microbatches", "is_told"), [(1, False), (2, True)])
def test_a_queue_is_named_where_microbatches_share_it(num_microbatches, is_told, monkeypatch):
    said = []
    monkeypatch.setattr(attributes, "warn_once", said.append)
    module = nn.Linear(1, 1)
    module.bank = [torch.zeros(1) for _ in range(3)]
    found = Attributes(module)
    changes = []
    for _ in range(num_microbatches):
        found.enter()
        module.bank.append(torch.ones(1))
        module.bank.pop(0)
        changes.append(found.take_changes(2))
    sizes, weights = [2] * num_microbatches, [1 / num_microbatches] * num_microbatches
    found.merged(changes, sizes, weights)
    assert len(said) == is_told
    assert all("A step appends to self.bank and" in text and "collections.deque(maxlen=...)" in text for text in said)


@pytest.mark.parametrize("as_array", [torch.tensor, np.array])
def test_rows_of_truth_values_are_those_of_their_microbatch(as_array):
    before = as_array([True, False, False, True])
    values = [as_array([False, False, False, True]), as_array([True, False, True, True])]
    after = Merge((2, 2), (0.5, 0.5)).values(values, before, "self.seen")
    assert type(after) is type(before)
    assert after.tolist() == [False, False, True, True]
