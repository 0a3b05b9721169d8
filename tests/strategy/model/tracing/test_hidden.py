"""Tensors where nobody can take them out: layers that return them so are refused, with a way out.

The zoo's `layers_that_return_functions` trains with such that can be opened.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.forms.hidden import hides_tensor, opened
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_map_only, tree_unflatten
from tests.strategy.model.stages import Followed


class Layer(nn.Linear):
    def __init__(self, leave):
        super().__init__(4, 4)
        self.leave = leave

    def forward(self, x, context):
        y = super().forward(x)
        return y, self.leave(context, y.mean())


class Model(nn.Module):
    def __init__(self, leave):
        super().__init__()
        self.layers = nn.ModuleList(Layer(leave) for _ in range(2))

    def step(self):
        x, context = torch.ones(2, 4), SimpleNamespace(losses=set())
        for layer in self.layers:
            x, _ = layer(x, context)
        return x.sum()


def with_attribute(tensor, value):
    tensor.auxiliary = value
    return tensor


@pytest.mark.parametrize(
    ("leave", "kind"),
    [
        (lambda _, v: (lambda context: lambda: context)(SimpleNamespace(value=v)), "a 'function'"),
        (lambda _, v: {v}, "a 'set'"),
        (lambda _, v: SimpleNamespace(values=frozenset([v])), "a 'SimpleNamespace'"),
        (lambda _, v: iter([v]), "a 'list_iterator'"),
        (lambda _, v: (each for each in [v]), "a 'generator'"),
        (lambda _, v: v.add, "a 'builtin_function_or_method'"),
        (lambda context, v: context.losses.add(v), "a 'SimpleNamespace'"),
        (lambda _, v: with_attribute(torch.ones(2), v), "the attributes of a tensor"),
    ],
)
def test_what_cannot_be_taken_apart_is_refused(leave, kind):
    followed = Followed(Model(leave), lambda owner: owner.step(), 2)
    try:
        said = f"'layers.0' returns tensors inside of {kind}.* tuple, list, dict or dataclass"
        with pytest.raises(ConfigurationError, match=said):
            followed.trace()
    finally:
        followed.close()


def test_functions_that_hide_nothing_are_passed_on():
    followed = Followed(Model(lambda _, v: (torch.relu, len, {1}, iter([2]), lambda x: x)), lambda o: o.step(), 2)
    try:
        assert followed.trace().failure is None
    finally:
        followed.close()


def counting(tensor, others, *, scale=2):
    count = 0

    def inner(x, offset=tensor + 1, *, factor=tensor * 3):
        nonlocal count, tensor
        count += 1
        tensor = tensor + 1
        return scale * x + offset * factor + tensor + others["sum"][0] + count

    return inner


def test_functions_are_opened_and_made_of_other_tensors():
    value, others = torch.tensor(2.0), {"sum": [torch.tensor(5.0)]}
    function = partial(counting(value, others), torch.tensor(1.0))
    wanted = [function().item(), function().item()]
    found = opened({"undo": (partial(counting(value, others), torch.tensor(1.0)), 3)})
    leaves, structure = tree_flatten(found)
    assert not any(map(hides_tensor, leaves))
    assert sum(isinstance(leaf, torch.Tensor) for leaf in leaves) == 5
    again = tree_unflatten(leaves, structure)["undo"][0]
    assert [again().item(), again().item()] == wanted
    zeros = tree_map_only(torch.Tensor, torch.zeros_like, found)["undo"][0]
    assert [zeros().item(), zeros().item()] == [1 + 1, 2 + 2]  # it counts, and adds that up


def test_functions_that_know_themselves_or_nothing_stay():
    value = torch.ones(1)

    def first(x):
        return second(x - value) if x > 0 else x

    def second(x):
        return first(x)

    found = opened(first)
    assert found(torch.tensor(2.0)) == first(torch.tensor(2.0)) == 0
    assert hides_tensor(found)  # still, and so is refused
    for kept in (opened, lambda: 1, [lambda: 1], {"a": (len,)}, partial(opened, [1], value=value), value):
        assert opened(kept) is kept
