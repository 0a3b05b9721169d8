"""Which values have sizes that their sender has to tell; others cost no message."""

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Followed, Holder, Stages
from tests.strategy.model.tracing.cases import CASES, Block, Case


def varying_sent(case, num_stages=2):
    """How many values of varying size the first stage sends, and how many in all."""
    owner, step = case.make()
    stages = Stages(owner, step, num_stages=num_stages)
    try:
        stages.run()
        first = stages.programs[0]
        return len(first.varying & set(first.sent)), len(first.sent)
    finally:
        stages.close()


@pytest.mark.parametrize("name", ["chain", "tuples", "selected_by_the_batch", "chosen_rows_per_layer"])
def test_fixed_sizes_are_not_told(name):
    assert varying_sent(CASES[name])[0] == 0


@pytest.mark.parametrize("name", ["selected_by_a_stage", "layers_that_drop_rows", "packed_sequences"])
def test_sizes_of_values_are_told(name):
    varying, sent = varying_sent(CASES[name])
    assert 1 <= varying <= sent


class Cuts(Block):
    """Python reads a number in it that is another one in a trace, and no operator tells so."""

    def forward(self, x):
        return super().forward(x)[: 4 + int(self.linear.weight.any())]


def hidden_size(net, x, y):
    """Python asks for the size where the tensor is not."""
    x = net.stem(x)
    number = net.cuts(x).shape[0]
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) * number


def test_a_size_that_nobody_has_told_of_is_refused():
    owner, step = Case(hidden_size, None, {}).make()
    owner.cuts = Cuts()
    stages = Stages(owner, step, num_stages=2)
    try:
        with pytest.raises(ConfigurationError, match="so its form depends on values"):
            stages.run()
    finally:
        stages.close()


def test_a_walk_over_different_values_is_short_in_a_trace():
    times = []

    def step(owner):
        times.append(0)
        x = owner.model(torch.ones(64, 16))
        loss = x.square().mean()
        for label in (x > 0).long().unique():
            times[-1] += 1
            loss = loss + (x * (x.detach() == label)).mean()
        return loss

    followed = Followed(Holder(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))), step, 2)
    assert followed.trace().failure is None
    assert 2 <= max(times) <= 16
    followed.close()
