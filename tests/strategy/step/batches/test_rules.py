"""What is learnt of values at a place, and for which values it holds."""

import numpy as np
import pytest
import torch

from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.rules import Rules, merged_by

ROWS = [torch.full((2, 3), value) for value in (1.0, 3.0)]


def knowing(*found, path="output"):
    rules = Rules()
    rules.learn(path, *found)
    return rules


def merged(rules, values):
    return merge_outputs(values, [2, 2], rules=rules)


def test_a_number_that_a_trace_of_the_second_does_not_know_is_a_count_though_one_of_the_first_comes_to_it():
    rules = Rules()
    rules.learn("hits", 1, 1, 1, 1, 0)
    assert rules.of("hits", 1) == "sum"
    rules.learn("batches", 1, 1, 1, 1, 1)
    assert rules.of("batches", 1) == "first"


def test_a_rule_of_a_list_says_nothing_of_tensors_arrays_and_other_lists():
    rules = knowing([1, 2], [1, 2], [1, 2], [1, 2])
    assert merged(rules, [[1, 2], [1, 2]]) == [1, 2]
    assert len(merged(rules, ROWS)) == len(merged(rules, [rows.numpy() for rows in ROWS])) == 4
    assert len(merged(rules, [rows.tolist() for rows in ROWS])) == 4


def test_a_rule_of_tensors_holds_for_their_number_of_dimensions():
    means = torch.ones(3)
    rules = knowing(means, means, *(torch.empty(3, device="meta"),) * 2)
    assert merged(rules, [means, 3 * means]).tolist() == [2, 2, 2]
    assert merged(rules, [np.ones(3), 3 * np.ones(3)]).tolist() == [2, 2, 2]
    assert len(merged(rules, ROWS)) == 4
    assert merged(rules, [torch.ones(3) > 0] * 2).tolist() == [True] * 6


def test_a_rule_of_integers_says_nothing_of_other_numbers():
    rules = knowing(2, 2, 2, 4)
    assert (merged(rules, [7, 7]), merged(rules, [7.0, 7.0])) == (14, 7.0)


def test_what_values_have_told_holds_for_numbers_of_these_dimensions():
    rules = knowing(torch.ones(()), torch.ones(()), *(torch.empty((), device="meta"),) * 2)
    before = rules.set({"output": "sum"}, 0)
    assert (float(merged(rules, [torch.ones(())] * 2)), merged(rules, [1.5, 1.5])) == (2.0, 3.0)
    assert len(merged(rules, ROWS)) == 4
    rules.put_back(before)
    assert float(merged(rules, [torch.ones(())] * 2)) == 1.0


def test_sizes_that_were_not_seen_are_looked_at_a_few_times():
    rules, looks = knowing(*(torch.ones(3),) * 2, *(torch.empty(3, device="meta"),) * 2), []
    for size in (3, *range(4, 40)):
        with rules.comparing(lambda size=size: looks.append(size)):
            assert merged(rules, [torch.ones(size)] * 2).shape == (size,)
    assert looks == list(range(4, 12))
    for name in range(100):
        with rules.comparing(lambda name=name: looks.append(name)):
            rules.of(f"output[{name}]", 1)
    assert len(looks) == 64


def test_zeros_tell_nothing_and_use_up_no_look():
    rules, looked = Rules(), []

    def look():
        looked.append(1)
        rules.learn("an epoch's number", 2, 2, 2, 2)

    def merged(value):
        with rules.comparing(look):
            return merge_outputs([value, value], (2, 2), rules=rules, path="an epoch's number")

    assert [merged(0) for _ in range(20)] == [0] * 20
    assert not looked
    assert merged(2) == 2  # although microbatches have two samples
    assert merged(3) == 3
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("rule", "values", "expected"),
    [
        ("largest", [0.0, torch.tensor(1.5)], 1.5),
        ("least", [torch.tensor(1.5), 0], 0.0),
        ("sum", [0, torch.tensor(1.5), torch.tensor(2)], 3.5),
        ("end", [torch.tensor(1.5), 2.0], 2.0),
        ("first", [torch.tensor(2.0), 2], 2.0),
    ],
)
def test_numbers_of_which_some_are_tensors_are_put_together(rule, values, expected):
    (found,) = merged_by(rule, values)
    assert float(found) == expected


def test_rows_that_are_first_or_last_of_all_samples_are_cut_out_of_those_of_short_microbatches():
    rows = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))
    first, second, both = rows[:5], rows[5:], rows
    for taken, expected in ((slice(2), rows[:2]), (slice(7), rows[:7]), (slice(-2, None), rows[-2:])):
        rules = knowing(first[taken], second[taken], first[taken], both[taken])
        values = [row[None][taken] for row in rows]
        assert torch.equal(merge_outputs(values, [1] * 10, rules=rules), expected)
        assert merge_outputs([value.numpy() for value in values], [1] * 10, rules=rules).tolist() == expected.tolist()
        unequal = [rows[:4], rows[4:5], rows[5:]]
        merged = merge_outputs([rows[taken] for rows in unequal], [4, 1, 5], rules=rules)
        assert torch.equal(merged, expected)


def test_items_that_are_first_or_last_of_all_samples_are_cut_out_of_those_of_short_microbatches():
    items = [f"text {index}" for index in range(10)]
    for taken, expected in ((slice(2), items[:2]), (slice(7), items[:7]), (slice(-2, None), items[-2:])):
        rules = knowing(items[:5][taken], items[5:][taken], items[:5][taken], items[taken])
        assert merge_outputs([[item][taken] for item in items], [1] * 10, rules=rules) == expected
        assert (
            merge_outputs([items[:4][taken], items[4:5][taken], items[5:][taken]], [4, 1, 5], rules=rules) == expected
        )


def test_a_vector_is_no_rows_though_it_is_shorter_in_a_later_batch():
    rules = Rules()
    first, second = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])
    rules.learn("output", first, second, first, first)
    assert merge_outputs([first[:2], second[:2]], [4, 4], rules=rules).tolist() == [1.0, 2.0]


def test_of_rules_that_fit_one_batch_later_ones_tell_which_it_is():
    looks = iter([(3, 1, 3, 3), (2, 5, 2, 2)])
    rules = Rules()

    def look():
        rules.learn("self.first", *next(looks))

    with rules.comparing(look):
        assert rules.of("self.first", 3) == "largest"
    with rules.comparing(look):
        assert rules.of("self.first", 2) == "begin"
    with rules.comparing(lambda: pytest.fail("all is known")):
        assert rules.of("self.first", 7) == "begin"
    rules.set({"self.last": "largest"}, 0)
    rules.fit(["self.last"], ["largest", "end"], 0)
    with rules.comparing(lambda: rules.learn("self.last", 4, 3, 4, 3)):
        assert rules.of("self.last", 4) == "end"
