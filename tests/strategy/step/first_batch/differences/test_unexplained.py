"""How many numbers no rule explains, by choices of weights for the same microbatches."""

import math

import pytest

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.first_batch.differences.numbers import NumberCheck
from lightning_pfo.strategy.step.first_batch.differences.unexplained import Unexplained
from tests.strategy.step.first_batch.differences.situations import PLACE, situation


@pytest.mark.parametrize(
    ("whole", "unexplained"),
    [
        pytest.param(3.0, [0, 0, 0], id="the largest, by any weights"),
        pytest.param(1.5, [1, 0, 1], id="a mean, by its weights"),
        pytest.param(9.0, [1, 1, 1], id="what no rule makes, by none"),
    ],
)
def test_a_number_is_explained_by_a_rule_or_by_weights(whole, unexplained):
    unexplaining, of = Unexplained(NumberCheck(Rules())), situation((1.0, 3.0), whole, weight=0.5)
    parts, found, merges = of[0].parts, [], []
    for weights in ((0.5, 0.5), (0.75, 0.25), (0.25, 0.75)):
        parts.recorder.weights = weights
        found.append(unexplaining.number(of, 1e-6))
        merges.append(parts.merges)
        assert parts.recorder.weights == weights
    assert found == unexplained
    assert unexplaining.check.rules.of(PLACE, 1.0, ask=False) is None
    assert not unexplaining.check.open
    assert not unexplaining.check.unfit
    assert merges[2] - merges[1] < merges[0] / 2  # rules without weights are tried once


def test_what_fits_one_batch_is_not_taken_for_another():
    unexplaining = Unexplained(NumberCheck(Rules()))
    assert [unexplaining.number(situation((1.0, 3.0), whole, weight=0.5), 1e-6) for whole in (3.0, 9.0, math.nan)] == [
        0,
        1,
        0,
    ]
