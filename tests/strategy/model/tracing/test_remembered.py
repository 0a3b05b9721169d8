"""A step is traced several times; what its units return in form is found once."""

from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.forms.remembered import Outlines
from lightning_pfo.strategy.model.tracing.forms.talking import FirstCall
from lightning_pfo.strategy.model.tracing.placeholders import mark_placeholders
from tests.strategy.model.stages import Followed, Holder

CALLS = []


@pytest.fixture(autouse=True)
def others_forgotten(monkeypatch):
    """Layers of other tests are of the same kind."""
    monkeypatch.setattr(Outlines, "_first_given", WeakValueDictionary())


class Layer(nn.Module):
    """Notes that it is run; keeps each `stride`-th row."""

    def __init__(self, stride=1, counts=False, by_values=False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.stride, self.counts, self.by_values, self.number = stride, counts, by_values, 0

    def forward(self, x, keep=None):
        CALLS.append(self)
        if self.counts:
            self.number += 1
        if self.by_values:
            x = x[: int(keep.sum())]
        return self.linear(x)[:: self.stride]


def make(*layers, keep=None):
    owner = Holder(nn.ModuleList(layers))
    length = [8]

    def step(owner):
        x = torch.ones(length[0], 4)
        for layer in owner.model:
            x = layer(x, keep)
        return x.sum()

    return Followed(owner, step, 2), length


def trace(followed):
    """How often layers were run, and the shapes of what they return."""
    CALLS.clear()
    found = followed.trace()
    assert found.failure is None
    units = [event for event in found.events if event.units]
    return len(CALLS), [tuple(found.values[event.results[0].label].form.shape) for event in units]


def test_layers_that_are_alike_are_run_once_for_each_length():
    followed, length = make(*(Layer() for _ in range(5)))
    assert trace(followed) == (5, [(8, 4)] * 5)
    assert trace(followed) == (0, [(8, 4)] * 5)
    length[0] = 6
    assert trace(followed) == (2, [(6, 4)] * 5)  # the first takes the batch, the others what has a gradient
    for parameter in followed.owner.parameters():
        parameter.requires_grad_(False)
    assert trace(followed)[0] == 2
    followed.close()


def test_layers_of_other_stages_are_alike_too():
    followed, length = make(*(Layer() for _ in range(5)))
    trace(followed)
    mark_placeholders(followed.owner.model[2:].to("meta"))
    length[0] = 6
    assert trace(followed) == (2, [(6, 4)] * 5)
    followed.close()


def test_those_that_call_the_same_functions_are_asked_once_whether_they_tell_others_something(monkeypatch):
    asked = []

    def talks(self, owner, call):
        asked.append(self)
        return False

    monkeypatch.setattr(FirstCall, "talks", talks)
    followed, _ = make(*(Layer(stride=stride) for stride in (1, 1, 1, 1, 3)))
    trace(followed)
    assert len(asked) == 3  # the first takes the batch, the last says another number
    followed.close()


def test_layers_that_return_something_else_are_taken_for_what_they_are():
    followed, length = make(*(Layer(stride=stride) for stride in (1, 2, 1, 3)))
    assert trace(followed) == (4, [(8, 4), (4, 4), (4, 4), (2, 4)])
    for size, shapes in ((8, [8, 4, 4, 2]), (12, [12, 6, 6, 2]), (13, [13, 7, 7, 3])):
        length[0] = size
        assert trace(followed)[1] == [(rows, 4) for rows in shapes]
    followed.close()


def test_values_of_a_number_decide_too():
    followed, _ = make(Layer(by_values=True), keep=torch.tensor(3))
    assert trace(followed) == (1, [(3, 4)])  # of a first attempt, without values, nothing is left
    followed.close()
    keep = torch.tensor(3)
    followed, _ = make(Layer(by_values=True), keep=keep)
    trace(followed)
    assert trace(followed) == (0, [(3, 4)])
    keep.fill_(2)
    assert trace(followed)[1] == [(2, 4)]
    followed.close()


@pytest.mark.parametrize("options", [{"counts": True}, {"by_values": True}])
def test_what_the_arguments_do_not_decide_is_found_each_time(options):
    keep = torch.tensor([1, 1, 1, 0])
    followed, _ = make(*(Layer(**options) for _ in range(2)), keep=keep)
    trace(followed)
    assert trace(followed) == ((0 if "by_values" in options else 2), [((3 if "by_values" in options else 8), 4)] * 2)
    keep[0] = 0
    assert trace(followed)[1] == [((2 if "by_values" in options else 8), 4)] * 2
    followed.close()
