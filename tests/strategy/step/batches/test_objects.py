"""Splitting objects of users' classes: tensors deep in them are split too, or it is said that they are not."""

import functools
import logging
from collections import deque

import numpy as np
import pytest
import torch

from lightning_pfo.strategy.step.batches.check import checksum
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.splitting import batch_size_of, split_batch
from tests.strategy.objects import Callable, Own, Slots

X = torch.arange(8).reshape(4, 2)
Y = torch.arange(4)


DEEP = {
    "an object": (lambda x: Own(inner=Own(x=x)), lambda found: found.inner.x),
    "three objects": (lambda x: Own(a=Own(b=Own(x=x))), lambda found: found.a.b.x),
    "a dict in an object": (lambda x: Own(inner=Own(store={"x": x})), lambda found: found.inner.store["x"]),
    "an object in a dict": (lambda x: Own(store={"x": Own(x=x)}), lambda found: found.store["x"].x),
    "objects in a list": (lambda x: Own(parts=[Own(x=x), Own(x=x), Own(x=x)]), lambda found: found.parts[1].x),
    "an array": (lambda x: Own(inner=Own(x=x.numpy())), lambda found: found.inner.x),
    "slots": (lambda x: Slots(x), lambda found: found.x),
    "slots in an object": (lambda x: Own(inner=Slots(x)), lambda found: found.inner.x),
}


@pytest.mark.parametrize(("make", "x_of"), DEEP.values(), ids=DEEP)
def test_tensors_deep_in_objects_are_split(make, x_of, caplog):
    batch = (Y, make(X))
    parts = split_batch(batch, 2).parts
    assert not caplog.records
    assert [x_of(part[1]).tolist() for part in parts] == [X[:2].tolist(), X[2:].tolist()]
    assert all(type(part[1]) is type(batch[1]) for part in parts)
    assert x_of(batch[1]).tolist() == X.tolist()
    assert x_of(merge_outputs(parts, (2, 2))[1]).tolist() == X.tolist()
    assert batch_size_of(make(X)) == 4
    assert checksum(batch) != checksum((Y, make(X + 1)))


def back(x):
    outer = Own(x=x, inner=Own())
    outer.inner.outer = outer
    return outer


def ring(x):
    first = Own(other=Own(store={"x": x}))
    first.other.other = Own(other=first)
    return first


WHOLE = {
    "can be called": lambda: Callable(x=X),
    "can be called, in an object": lambda: Own(inner=Callable(x=X)),
    "a partial function": lambda: functools.partial(torch.add, X),
    "leads back": lambda: ring(X),
    "sizes differ": lambda: Own(inner=Own(x=X, edges=torch.zeros(2, 9))),
    "others beside": lambda: Own(inner=Own(x=X, found=deque([X]))),
}


@pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)
def test_what_cannot_be_split_is_given_whole_and_said(make, caplog):
    with caplog.at_level(logging.WARNING):
        parts = split_batch({"x": X, "own": make()}, 2)
    assert [part["x"].tolist() for part in parts] == [X[:2].tolist(), X[2:].tolist()]
    assert "batch['own']" in caplog.text
    assert "the whole of it" in caplog.text


def test_an_object_is_split_though_another_leads_back_to_it(caplog):
    with caplog.at_level(logging.WARNING):
        parts = split_batch((Y, back(X)), 2)
    assert parts[1][1].x.tolist() == X[2:].tolist()
    assert "batch[1].inner is a Own" in caplog.text


def test_an_object_that_is_its_own_attribute_is_split(caplog):
    own = Own(x=X)
    own.me = own
    with caplog.at_level(logging.WARNING):
        parts = split_batch((Y, own), 2)
    assert parts[1][1].x.tolist() == X[2:].tolist()
    assert "batch[1].me is a Own" in caplog.text


def test_objects_without_samples_are_given_whole_and_nothing_is_said(caplog):
    settings = Own(inner=Own(scale=torch.tensor(2.0), table=np.zeros(7), names=["a"]), function=torch.relu)
    with caplog.at_level(logging.WARNING):
        parts = split_batch((Y, settings), 2)
    assert all(part[1] is settings for part in parts)
    assert not caplog.records
