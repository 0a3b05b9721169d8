"""Rules for numbers that a step leaves, found by comparing batches that were run by microbatches and in one piece."""

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.first_batch.differences.numbers import NumberCheck
from tests.strategy.step.first_batch.differences.situations import PLACE, situation


def test_the_rule_that_fits_all_batches_is_taken():
    check = NumberCheck(Rules())
    assert check.find_rules([situation((1.0, 3.0), 2.0), situation((2.0, 3.0), 2.5)], 1e-6) == {}
    assert check.rules.of(PLACE, 1.0, ask=False) == "mean"


def test_of_a_number_that_no_rule_fits_that_of_one_batch_is_nearer_than_none():
    check = NumberCheck(Rules())
    found = check.find_rules([situation((1.0, 3.0), 2.0), situation((1.0, 2.0), 1.8)], 1e-6)
    assert list(found) == [PLACE]
    assert check.rules.of(PLACE, 1.0, ask=False) == "mean"


def test_where_nothing_fits_a_number_stays_as_it_is():
    check = NumberCheck(Rules())
    assert check.find_rules([situation((1.0, 3.0), 9.0), situation((1.0, 2.0), 1.8)], 1e-6)
    assert check.rules.of(PLACE, 1.0, ask=False) is None


def test_what_rounding_leaves_of_sums_that_cancel_tells_of_no_rule():
    check = NumberCheck(Rules())
    assert check.find_rules([situation((-8e-8, 4e-8), 4e-8)], 1e-5) == {}
    assert check.untold == {PLACE}
    assert check.find_rules([situation((1.0, 3.0), 2.0)], 1e-5) == {}
    assert check.rules.of(PLACE, 1.0, ask=False) == "mean"


def test_small_numbers_have_rules_too():
    check = NumberCheck(Rules())
    assert check.find_rules([situation((8e-8, 4e-8), 6e-8)], 1e-5) == {}
    assert check.rules.of(PLACE, 1.0, ask=False) == "mean"


def test_equal_numbers_whose_sum_fits_tell_little_until_they_differ():
    check = NumberCheck(Rules())
    assert check.find_rules([situation((8.0, 8.0), 16.0, weight=0.5)], 1e-6) == {}
    assert check.untold == {PLACE}
    assert check.rules.of(PLACE, 1.0, ask=False) == "sum"
    assert list(check.find_rules([situation((8.0, 9.0), 12.0, weight=0.5)], 1e-6)) == [PLACE]
    assert not check.untold
