"""Layers return tensors whose memory lies in another order, of which a step makes contiguous ones, or does not."""

import copy

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import FakeTensor
from tests.strategy.model.stages import Followed, assert_equal, run_cut, run_plainly
from tests.strategy.model.tracing.cases import Block, Case


class Linear(Block):
    """What it returns may be changed in place."""

    def forward(self, x):
        return self.linear(x)


class Turned(Linear):
    """Returns a tensor that is not contiguous."""

    def forward(self, x):
        return super().forward(x).T.contiguous().T


class TurnedUnlessTraced(Linear):
    """As kernels do that choose an order by themselves."""

    def forward(self, x):
        result = super().forward(x)
        return result if isinstance(result, FakeTensor) else result.T.contiguous().T


class TurnedWhereTraced(Linear):
    def forward(self, x):
        result = super().forward(x)
        return result.T.contiguous().T if isinstance(result, FakeTensor) else result


class Convolves(nn.Module):
    """Its weights lie in another order, and so does what it returns."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        self.to(memory_format=torch.channels_last)

    def forward(self, x, y):
        x = x.reshape(2, 3, 4, 2).to(memory_format=torch.channels_last)
        for layer in self.layers:
            x = layer(x).contiguous()
        return nn.functional.cross_entropy(x.flatten(2).mean(2), y[:2])


def is_contiguous(net, x, y):
    h = net.stem(x)
    for layer in net.layers:
        h = layer(h.contiguous())
    return net.loss(h.contiguous(), y)


def of_another_format(net, x, y):
    h = net.stem(x)
    for layer in net.layers:
        h = layer(h.to(torch.float32, memory_format=torch.contiguous_format))
    return net.loss(h, y)


def changed_when_it_is(net, x, y):
    """Nothing but the contiguous one is changed."""
    h = net.stem(x)
    for layer in net.layers:
        h = layer(h)
        own = h.contiguous()
        own.mul_(2)
        h = h + own
    return net.loss(h, y)


def looked_at(net, x, y):
    h = net.stem(x)
    for layer in net.layers:
        h = layer(h)
        h = h * (1.0 if h.is_contiguous() else 2.0) + h.stride()[0]
    return net.loss(h, y)


STEPS = [is_contiguous, of_another_format, changed_when_it_is, looked_at]
CASES = {
    **{f"{step.__name__}, {kind.__name__}": (step, kind) for step in STEPS for kind in (Linear, Turned)},
    **{
        f"{step.__name__}, {kind.__name__}": (step, kind)
        for step in STEPS[:2]
        for kind in (TurnedUnlessTraced, TurnedWhereTraced)
    },
}


def make(step, kind):
    return Case(step, None, {"layer": kind}).make()


def convolves():
    torch.manual_seed(3)
    return Convolves(), Case(None, None, {}).make()[1]


@pytest.mark.parametrize("name", [*CASES, "Convolves"])
def test_every_cut_is_equal(name):
    owner, run = convolves() if name == "Convolves" else make(*CASES[name])
    expected = run_plainly(copy.deepcopy(owner), run)
    followed = Followed(owner, run, 2)
    try:
        trace = followed.trace()
        for place in range(1, len(trace.events)):
            assert_equal(run_cut(owner, followed.step, trace, [place]), expected)
    finally:
        followed.close()
