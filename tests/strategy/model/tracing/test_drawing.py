"""Which steps are traced anew for each microbatch, since random numbers may decide what they call."""

import pytest
import torch
from torch import nn
from torchmetrics import MeanSquaredError
from torchmetrics.wrappers import BootStrapper

from lightning_pfo.strategy.model.tracing.noticing.drawing import draws
from tests.strategy.model.stages import Followed, Holder
from tests.strategy.model.tracing.cases import Block


def step(owner, *, tells, drops):
    x = owner.model(torch.ones(4, 6))
    if tells:
        owner.score.update(x, torch.ones(4, 6))
    if drops and torch.rand(()) > 2:
        x = owner.model[0](x)
    return x.mean()


@pytest.mark.parametrize("strategy", ["multinomial", "poisson"])
@pytest.mark.parametrize(
    ("tells", "drops", "is_random"),
    [(False, False, False), (True, False, False), (False, True, True), (True, True, True)],
)
def test_what_a_metric_draws_decides_about_no_layer(strategy, tells, drops, is_random):
    score = BootStrapper(MeanSquaredError(), num_bootstraps=3, sampling_strategy=strategy)
    owner = Holder(nn.Sequential(Block(), Block()), score=score)
    followed = Followed(owner, lambda owner: step(owner, tells=tells, drops=drops), 2, "model")
    try:
        trace = followed.trace()
    finally:
        followed.close()
    assert trace.failure is None
    assert trace.draws is is_random


def test_functions_that_draw_are_told_by_torch():
    assert all(map(draws, (torch.rand, torch.multinomial, torch.poisson, torch.Tensor.normal_)))
    assert not any(map(draws, (torch.add, torch.Tensor.__getitem__, nn.functional.linear, torch.stack)))
