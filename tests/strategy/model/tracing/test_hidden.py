"""Tensors where nobody can take them out: layers that return them so are refused, with a way out."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
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
        (lambda _, v: lambda x: x + v, "a 'function'"),
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
