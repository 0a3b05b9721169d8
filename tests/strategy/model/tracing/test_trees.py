"""What calls are given is taken apart as torch does it, however often something of that form has come before."""

from collections import OrderedDict, namedtuple

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree

from lightning_pfo.strategy.model.tracing import trees
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_unflatten

Pair = namedtuple("Pair", "first second")
LEAVES = st.sampled_from([None, 1, 2.5, "text", True, torch.ones(2), nn.Parameter(torch.ones(1)), torch.float32])
KEYS = st.one_of(st.text(max_size=2), st.integers(0, 2), st.booleans(), st.tuples(st.integers(0, 1)))


def containers(inside):
    return st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(KEYS, inside, max_size=3),
        st.dictionaries(KEYS, inside, max_size=3).map(OrderedDict),
        st.tuples(inside, inside).map(lambda both: Pair(*both)),
    )


@given(st.recursive(LEAVES, containers, max_leaves=8))
def test_values_are_taken_apart_and_put_together_as_by_torch(values):
    expected, structure = _pytree.tree_flatten(values)
    for _ in range(2):
        leaves, found = tree_flatten(values)
        assert len(leaves) == len(expected)
        assert all(a is b for a, b in zip(leaves, expected, strict=True))
        assert found == structure
        made = tree_unflatten(leaves, found)
        assert type(made) is type(values)
        assert _pytree.tree_flatten(made)[1] == structure


def test_dicts_are_put_together_in_their_own_order():
    for names in ("ab", "ba"):
        assert list(tree_unflatten(*tree_flatten(dict.fromkeys(names, 1)))) == list(names)


def test_few_structures_are_remembered(monkeypatch):
    monkeypatch.setattr(trees, "_MOST_STRUCTURES", 10)
    for length in range(40):
        tree_flatten([1] * length)
    assert len(trees._STRUCTURES) <= 11
