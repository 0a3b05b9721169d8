"""Cutting a backward in two gives the gradients of a whole one, and nothing is computed twice."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pfo.strategy.engine.split_backward import backward_of_inputs


class Counted(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Counted.calls += 1
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.norm = nn.LayerNorm(4)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.unused = nn.Linear(4, 4)


def chain(net, x, other):
    for linear in net.linears:
        x = Counted.apply(linear(x).tanh())
    return [net.norm(x)]


def view(net, x, other):
    return [net.linears[0](x).flatten()]


def several(net, x, other):
    """Of these only the first depends on both inputs; one is passed on, others depend on weights alone."""
    return [net.linears[0](x) * other, net.linears[1](x), x, net.linears[2](net.table), net.table]


def one_input_unused(net, x, other):
    return [net.linears[0](x)]


def no_input_used(net, x, other):
    return [net.linears[0](net.table)]


def shared_weight_of_two_paths(net, x, other):
    first, second, shared = net.linears[:3]
    return [shared(first(x)) + shared(second(other).tanh()).exp(), shared(x)]


def used_again_across_each_other(net, x, other):
    for index in (0, 1, 2, 0, 1, 2):
        x = net.linears[index](x).tanh()
    return [x, net.norm(net.linears[3](x))]


def hooked(net, x, other):
    x = net.linears[0](x)
    x.register_hook(lambda gradient: 3 * gradient)
    return [net.linears[1](x.tanh())]


def recomputed(net, x, other):
    for linear in net.linears:
        x = checkpoint(nn.Sequential(linear, nn.Tanh()), x, use_reentrant=False)
    return [x]


def frozen(net, x, other):
    net.linears[1].requires_grad_(False)
    net.linears[2].bias.requires_grad_(False)
    return chain(net, x, other)


def loss(net, x, other):
    return [(net.linears[0](x) @ net.table.T).logsumexp(0).mean()]


GRAPHS = (
    chain,
    view,
    several,
    one_input_unused,
    no_input_used,
    shared_weight_of_two_paths,
    used_again_across_each_other,
    hooked,
    recomputed,
    frozen,
    loss,
)


@pytest.mark.parametrize("graph", GRAPHS)
def test_two_parts_make_the_whole(graph):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        net = Net()
        inputs = [torch.randn(5, 4, requires_grad=True) for _ in range(2)]
        whole, whole_inputs = copy.deepcopy(net), copy.deepcopy(inputs)
        outputs, whole_outputs = graph(net, *inputs), graph(whole, *whole_inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = [] if graph is loss else [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(whole_outputs, gradients or None)

    finish = backward_of_inputs(outputs, gradients, inputs)
    for mine, theirs in zip(inputs, whole_inputs, strict=True):
        assert_equal(mine.grad, theirs.grad)
    assert all(parameter.grad is None for parameter in net.parameters())
    del outputs
    Counted.calls = 0
    finish()
    assert Counted.calls == 0
    names = {name for name, parameter in whole.named_parameters() if parameter.grad is not None}
    assert names
    for (name, mine), theirs in zip(net.named_parameters(), whole.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad, name)


def assert_equal(mine, theirs, name=None):
    assert (mine is None) == (theirs is None), name
    if theirs is not None:
        torch.testing.assert_close(mine, theirs, msg=name)


def test_gradients_add_to_those_of_earlier_microbatches():
    net = nn.Linear(3, 2)
    for _ in range(2):
        x = torch.ones(1, 3, requires_grad=True)
        backward_of_inputs([net(x).sum()], [], [x])()
    assert net.weight.grad.tolist() == [[2.0] * 3] * 2
    assert net.bias.grad.tolist() == [2.0] * 2
