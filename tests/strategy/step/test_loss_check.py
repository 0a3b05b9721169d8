import math
import re

import pytest
import torch

from lightning_pfo.strategy.step.first_batch.losses import Losses, describe, differ, is_no_weighted_mean, tolerance_of

FP32 = tolerance_of([torch.float32])


def repeated(of_microbatches, of_all):
    return [Losses(of_microbatches, of_all)] * 4


@pytest.mark.parametrize("of_all", [1.5, 1.5 * (1 + 5e-4)])
def test_rounding_is_no_difference(of_all):
    assert not differ([Losses((1.0, 2.0), of_all)], FP32)


def test_narrow_types_round_more():
    losses = [Losses((1.0, 2.0), 1.5 * 1.01)]
    assert differ(losses, FP32)
    assert differ(losses, tolerance_of([torch.float16, torch.float32]))
    assert not differ(losses, tolerance_of([torch.bfloat16, torch.float32]))


def test_losses_that_are_not_finite_are_not_compared():
    for bad in (math.nan, math.inf):
        assert not differ([Losses((1.0, bad), 2.0)], FP32)
        assert not differ([Losses((1.0, 2.0), bad)], FP32)
    assert not differ([Losses((0.0, 0.0), 0.0)], FP32)


def test_losses_that_cancel_are_not_compared_with_what_is_left():
    assert not differ([Losses((0.4, -0.4 + 2e-8), 5e-9)], FP32)
    assert not differ([Losses((3e-8, -1e-8), -5e-8)], FP32)
    assert differ([Losses((0.4, -0.4), 0.1)], FP32)


def test_random_losses_differ_where_chance_does_not_explain_it():
    generator = torch.Generator().manual_seed(0)

    def draws(factor, number):
        losses = 1 + 0.2 * torch.randn(number, 5, generator=generator)
        return [Losses(tuple(row[:4].tolist()), factor * row[4].item()) for row in losses]

    assert not any(differ(draws(1, 4), FP32) for _ in range(10_000))
    assert differ([Losses((1.0, 1.1), 4.1), Losses((1.05, 1.0), 4.3)], FP32)
    assert not differ([Losses((1.0, 1.1), 1.2), Losses((1.05, 1.0), 1.4)], FP32)


def test_what_lies_between_the_losses_of_microbatches_may_be_a_weighted_mean():
    assert not is_no_weighted_mean(repeated((1.0, 2.0), 1.9), FP32)
    assert not is_no_weighted_mean(repeated((1.0, 2.0), 2.01), FP32)  # the rest of a regulariser
    assert is_no_weighted_mean(repeated((1.0, 2.0), 2.1), FP32)
    assert is_no_weighted_mean(repeated((1.0, 2.0), 0.9), FP32)
    assert not is_no_weighted_mean(repeated((1.0, 2.0), 2.1), tolerance_of([torch.bfloat16]))
    assert is_no_weighted_mean(repeated((0.0, 0.0), 0.7), FP32)


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        (((1.0, 2.0, 3.0), 6.0), r"is 6 on one device, .* which is 2 .*It is 3 times as large, so the loss is a sum"),
        (
            ((0.0, 0.0, 0.0), 1.5),
            r"is 1.5 on one device.* which is 0 .*It is 0 on every microbatch.*loss_over='batch'",
        ),
        (((1.0, 2.0, 3.0), 2.4), r"different weights.*-100"),
    ],
)
def test_the_message_has_both_numbers_and_the_way_out(losses, said):
    text = describe(repeated(*losses), 3, FP32)
    assert re.search(said, text)
    assert "check_loss=False" in text
    assert "the first 3 of 6" in describe(repeated(*losses), 6, FP32)
