"""Gradients are averaged over replicas in buckets, while the pipeline goes on, and are those of one device."""

import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.parallel.reductions import hand_out
from tests.launch import run_script

pytestmark = pytest.mark.slow


def test_gradients_of_replicas_are_averaged_in_buckets_and_sums_can_be_precise():
    run_script(Path(__file__).parents[1] / "scripts" / "buckets.py")


def test_sums_in_32_bits_are_let_go_of_as_those_in_16_are_handed_out():
    weights = [nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)) for _ in range(4)]
    weights[0].grad = torch.ones(3, dtype=torch.bfloat16)
    gradients = {weight: torch.full((3,), 2.0) for weight in weights}
    sums, alive = [weakref.ref(gradient) for gradient in gradients.values()], []

    class Watched(dict):
        def popitem(self):
            alive.append((sum(each() is not None for each in sums), sum(w.grad is not None for w in weights[1:])))
            return super().popitem()

    watched = Watched(gradients)
    gradients.clear()
    hand_out(watched)
    # beside those that are handed out, and the one that was last
    assert [of_sums + handed_out for of_sums, handed_out in alive] == [4, 5, 5, 5]
    assert [weight.grad.tolist() for weight in weights] == [[3.0] * 3] + [[2.0] * 3] * 3
