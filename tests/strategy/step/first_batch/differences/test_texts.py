"""Which texts of microbatches are others than one device's."""

from types import SimpleNamespace

import pytest

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair
from lightning_pfo.strategy.step.first_batch.differences.texts import differing_texts


def found(*draws, number=4, rounds=False, told=()):
    """What differs between lists of microbatches and of the batch, which are given for each draw."""
    sizes = SimpleNamespace(sizes=(1,) * number)
    runs = [
        [
            SimpleNamespace(
                texts=lambda rules, run=run: {f"output[{row}]": text for row, text in enumerate(run)}, recorder=sizes
            )
            for run in draw
        ]
        for draw in draws
    ]
    pairs = [Pair(*each) for each in runs]
    return dict(differing_texts(pairs, Rules(), 1e-5, rounds=rounds, told=told).values())


def rows(number, start=0):
    return [f"row{row}" for row in range(start, start + number)]


def test_texts_that_number_samples_are_others_and_each_kind_is_told_once():
    by_parts, whole = rows(3) * 4, rows(12)
    assert found((by_parts, whole)) == {"output[3]": "'row0' instead of 'row3'"}
    assert found((by_parts, whole), told={"output[]"}) == {}
    assert found((whole, whole)) == {}


def test_what_is_there_in_one_of_both_is_another():
    assert found((["3 rows"] * 4, ["12 rows"])) == {"output[0]": "'3 rows' instead of '12 rows'"}
    assert found((["a"], ["a", "b"])) == {"output[1]": "nothing instead of 'b'"}
    assert found((["first", None, "first", None], ["first", None, None, None]), number=2) == {
        "output[2]": "'first' instead of None"
    }


def test_few_that_rounding_decides_are_not_others_but_one_in_each_microbatch_is():
    whole = ["cat"] * 64
    few, first_of_each = (["dog" if row in others else "cat" for row in range(64)] for others in ([9], [16, 32, 48]))
    assert found((few, whole)) == {}
    assert found((first_of_each, whole)) == {"output[16]": "'dog' instead of 'cat'"}
    assert found((first_of_each, whole), rounds=True) == {}


def test_random_texts_are_not_others():
    assert found((["a", "b"], ["c", "d"]), (["e", "f"], ["g", "h"])) == {}
    assert found((["a", "x"], ["c", "y"]), (["e", "x"], ["g", "y"])) == {"output[1]": "'x' instead of 'y'"}


@pytest.mark.parametrize(
    ("one", "other", "is_other"),
    [
        ("loss 0.1235, ok", "loss 0.1234, ok", False),  # the last digit
        ("loss 0.12345678", "loss 0.12345671", False),  # rounding
        ("1.5e-07", "1.6e-07", False),
        ("loss 0.1237", "loss 0.1234", True),
        ("loss 0.1234, ok", "loss 0.1234, bad", True),
        ("3 of 0.5", "4 of 0.5", True),
        ("0.5", "0.5 0.5", True),
    ],
)
def test_numbers_within_texts_may_be_rounded(one, other, is_other):
    assert bool(found(([one], [other]))) is is_other
