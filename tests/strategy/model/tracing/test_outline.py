"""What outlines say of layers beside the forms that they return."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.forms.outline import outline_call

CPU = torch.device("cpu")


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, *args):
        return self.function(self.linear, *args)


def without_gradients(linear, x):
    with torch.no_grad():
        x = x * 2
    return linear(x)


def changes(linear, x, y):
    x.mul_(linear(y.detach()))
    return x.sum()


def outlined(function, *given):
    layer = Layer(function)
    return outline_call(layer, layer.forward, (given, {}), CPU)


def value():
    return torch.randn(2, 4, requires_grad=True) * 1


@pytest.mark.parametrize(
    ("function", "detached"),
    [
        (lambda linear, x, y: linear(x) + y, ()),
        (lambda linear, x, y: linear(x.detach()) + y, (0,)),
        (lambda linear, x, y: linear(x.data) + (y > 0), (0, 1)),
        (lambda linear, x, y: (linear(x), y), (1,)),  # which it gives back as it is: whoever takes that, takes it
        (lambda linear, x, y: linear(x) * y.argmax(1, keepdim=True), (1,)),
        (lambda linear, x, y: linear(x)[y.argmax(1) > 1], ()),  # with other values it may take others
        (changes, (1,)),
    ],
)
def test_arguments_that_get_no_gradients_are_known(function, detached):
    assert outlined(function, value(), value()).detached == detached


def test_one_argument_may_need_none():
    assert outlined(without_gradients, value()).detached == (0,)
    assert outlined(without_gradients, value().detach()).detached == ()


def test_nothing_is_guessed_of_what_cannot_differentiate():
    def differentiates(linear, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(linear(x).sum(), x)[0][0]

    with torch.no_grad(), pytest.raises(RuntimeError, match="does not require grad"):
        outlined(differentiates, value())
    assert outlined(differentiates, value()).leaves[0].shape == (4,)


def test_what_torch_func_differentiates_is_run_without_counting_what_is_kept():
    def jacobian(linear, x):
        return linear(x), torch.vmap(torch.func.jacrev(linear))(x)

    outline = outlined(jacobian, value())
    assert outline.way == 0
    assert [tuple(leaf.shape) for leaf in outline.leaves] == [(2, 4), (2, 4, 4)]
