"""Lists that a step uses as queues: each microbatch would find all of it, so they are told of."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.step.effects import attributes
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.merge import is_queue


@pytest.mark.parametrize(
    ("items", "before", "expected"),
    [
        ("bcd", "abc", True),
        ("cde", "abc", True),
        ("cd", "abc", True),
        ("abcd", "abc", False),
        ("bc", "abc", False),
        ("xyz", "abc", False),
        ("bad", "abc", False),
        ("", "abc", False),
        ("a", "", False),
    ],
)
def test_a_queue_has_lost_its_first_items_and_goes_on(items, before, expected):
    assert is_queue(list(items), list(before)) == expected


@pytest.mark.parametrize(("num_microbatches", "is_told"), [(1, False), (2, True)])
def test_a_queue_is_named_where_microbatches_share_it(num_microbatches, is_told, monkeypatch):
    said = []
    monkeypatch.setattr(attributes, "warn_once", said.append)
    module = nn.Linear(1, 1)
    module.bank = [torch.zeros(1) for _ in range(3)]
    found = Attributes(module)
    changes = []
    for _ in range(num_microbatches):
        found.enter()
        module.bank.append(torch.ones(1))
        module.bank.pop(0)
        changes.append(found.take_changes(2))
    sizes, weights = [2] * num_microbatches, [1 / num_microbatches] * num_microbatches
    found.merged(changes, sizes, weights)
    assert len(said) == is_told
    assert all("the list self.bank" in text and "collections.deque(maxlen=...)" in text for text in said)
