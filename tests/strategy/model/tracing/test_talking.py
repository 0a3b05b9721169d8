"""Layers that tell each other something beside tensors stay together; those that only remember something may not."""

import contextvars
import functools
import threading

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Followed, Stages

DEPTH = contextvars.ContextVar("depth", default=0)
LOCAL = threading.local()
NUMBERS, CACHE, LISTED = {"depth": 0}, {}, []


class ByContext:
    def begin(self):
        DEPTH.set(0)

    def next(self):
        DEPTH.set(DEPTH.get() + 1)
        return DEPTH.get()


class ByThread:
    def begin(self):
        LOCAL.depth = 0

    def next(self):
        LOCAL.depth += 1
        return LOCAL.depth


class ByDict:
    def begin(self):
        NUMBERS["depth"] = 0

    def next(self):
        NUMBERS["depth"] += 1
        return NUMBERS["depth"]


class ByList:
    def begin(self):
        self.left = [1, 2, 3, 4]

    def next(self):
        return self.left.pop(0)


class ByIterator:
    def begin(self):
        self.left = iter(range(1, 100))

    def next(self):
        return next(self.left)


@functools.lru_cache
def table(depth):
    return torch.arange(depth) + 1


class Cached:
    """Nothing is told: the first call alone computes something."""

    def begin(self):
        LISTED.clear()

    def next(self):
        NUMBERS["calls"] = NUMBERS.get("calls", 0) + 1  # which nothing depends on
        if "scale" not in CACHE:
            CACHE["scale"] = torch.full((3,), 2.0).sum().reciprocal().reciprocal()
        return 2 + 0 * len(table(4))


class Layer(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.linear, self.shared = nn.Linear(4, 4), shared

    def forward(self, x):
        return x + self.linear(x).relu() / self.shared.next()


class Counts(nn.Module):
    """Each by itself: noise that becomes less, an object of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.number, self.own, self.past = nn.Linear(4, 4), 0, {"number": 0}, []

    def forward(self, x):
        self.number += 1
        self.own["number"] += 1
        self.past.append(self.number)
        return x + self.linear(x) / (self.number + self.own["number"] + len(self.past))


class Skips(nn.Module):
    """A U-Net's way of passing on tensors, which are sent."""

    def __init__(self, is_first):
        super().__init__()
        self.linear, self.is_first = nn.Linear(4, 4), is_first

    def forward(self, x):
        if self.is_first:
            LISTED.append(x)
            return self.linear(x)
        return self.linear(x) + LISTED.pop()


class Net(nn.Module):
    def __init__(self, shared, make):
        super().__init__()
        self.shared, self.layers = shared, nn.ModuleList(make(index) for index in range(4))


def step_of(x, y):
    def step(net):
        net.shared.begin()
        hidden = x
        for layer in net.layers:
            hidden = layer(hidden)
        return nn.functional.mse_loss(hidden, y)

    return step


@pytest.mark.parametrize("shared", [ByContext(), ByThread(), ByDict(), ByList(), ByIterator()])
def test_layers_that_tell_each_other_something_are_not_divided(shared):
    torch.manual_seed(0)
    net = Net(shared, lambda _: Layer(shared))
    with pytest.raises(ConfigurationError, match=r"Units from 'layers\.0' to 'layers\.\d' tell each other something"):
        Stages(net, step_of(*torch.randn(2, 3, 4)), num_stages=2)


@pytest.mark.parametrize(
    "make",
    [lambda _: Layer(Cached()), lambda _: Counts(), lambda index: Skips(index < 2)],
    ids=["cached", "counts", "skips"],
)
def test_what_is_computed_once_or_sent_is_no_obstacle(make):
    followed = Followed(Net(Cached(), make), step_of(*torch.randn(2, 3, 4)), 2)
    trace = followed.trace()
    followed.close()
    assert trace.failure is None
    assert not trace.talking
    assert len([event for event in trace.events if event.units]) == 4
