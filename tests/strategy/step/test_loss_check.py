import math
import re

import pytest
import torch

from lightning_pfo.strategy.step.first_batch.differences.losses import (
    Losses,
    apart,
    describe,
    differ,
    is_no_weighted_mean,
    no_weights_explain,
)
from lightning_pfo.strategy.step.first_batch.differences.rounding import rounds_products, tolerance_of, types_noted

FP32 = tolerance_of([torch.float32])


def repeated(of_microbatches, of_all):
    return [Losses(of_microbatches, of_all)] * 4


@pytest.mark.parametrize("of_all", [1.5, 1.5 * (1 + 5e-6)])
def test_rounding_is_no_difference(of_all):
    assert not differ([Losses((1.0, 2.0), of_all)], FP32)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_what_couples_samples_a_little_is_a_difference(dtype, rounding):
    tolerance = tolerance_of([dtype])
    assert differ([Losses((1.0, 2.0), 1.5 * (1 + 3 * rounding))], tolerance)
    assert not differ([Losses((1.0, 2.0), 1.5 * (1 + rounding))], tolerance)
    assert not differ([Losses((1e-3, 2e-3), 1.5e-3 + 0.05 * rounding)], tolerance)  # of what was larger


def test_the_narrowest_type_decides():
    assert tolerance_of([torch.float64, torch.float32, torch.int64]) == tolerance_of([]) == FP32
    assert tolerance_of([torch.complex128]) == tolerance_of([torch.float64])
    assert tolerance_of([torch.float32, torch.bfloat16]) == 2 * 2**-7


def test_products_that_are_rounded_are_known(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    linear, convolution = torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Conv1d(1, 1, 1))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert [rounds_products(convolution, device) for device in (cpu, cuda)] == [False, True]
    assert not rounds_products(linear, cuda)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not rounds_products(convolution, cuda)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        assert rounds_products(linear, cuda)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert tolerance_of([torch.float32], rounds_products=True) == 1e-3
    assert tolerance_of([torch.float64], rounds_products=True) == tolerance_of([torch.float64])


def test_types_of_autocast_within_a_step_are_noted():
    found = set()
    linear = torch.nn.Sequential(torch.nn.Linear(2, 2))
    with types_noted(found):
        linear(torch.ones(1, 2))
        assert found == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            linear(torch.ones(1, 2))
    linear.double()(torch.ones(1, 2, dtype=torch.float64))
    assert found == {torch.float32, torch.bfloat16}


def test_numbers_that_differ_are_written_so():
    assert apart(1.5, 2.0) == ("1.5", "2")
    assert apart(1.5, 1.50002) == ("1.5", "1.50002")
    assert apart(10.00001, 10.00003) == ("10.00001", "10.00003")
    assert apart(1.0, 1.0) == ("1", "1")


def test_narrow_types_round_more():
    losses = [Losses((1.0, 2.0), 1.5 * 1.01)]
    assert differ(losses, FP32)
    assert differ(losses, tolerance_of([torch.float16, torch.float32]))
    assert not differ(losses, tolerance_of([torch.bfloat16, torch.float32]))


def test_losses_that_are_not_finite_on_one_device_are_not_compared():
    for bad in (math.nan, math.inf):
        assert differ([Losses((1.0, bad), 2.0)], FP32)
        assert not no_weights_explain([Losses((1.0, bad), 2.0)], FP32)
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
