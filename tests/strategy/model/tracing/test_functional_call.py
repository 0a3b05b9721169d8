"""Values that a step puts in the place of a layer's parameters."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear

from tests.strategy.model.stages import Holder, Stages, assert_equal, run_plainly

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def _parts():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    return Holder(hyper=nn.Linear(4, 16), net=net, target=nn.Linear(4, 4), norm=nn.BatchNorm1d(4).eval())


def _late(owner):
    """The last stage computes the weight and needs it."""
    hidden = owner.net(owner.hyper(X)[:, :4])
    weight = hidden[:, :1].mean() * torch.ones(4, 4)
    return functional_call(owner.target, {"weight": weight}, (hidden,)).square().mean()


def _early(owner):
    weight = owner.hyper(X.mean(0)).view(4, 4)
    return functional_call(owner.target, {"weight": weight}, (owner.net(X),)).square().mean()


def _by_function(owner):
    weight = owner.hyper(X.mean(0)).view(4, 4)
    return linear(owner.net(X), weight, owner.target.bias).square().mean()


def _by_gradients(owner):
    """The weights that an inner step gives, by which the outer one is differentiated too (MAML)."""
    weights = dict(owner.target.named_parameters())
    for _ in range(2):
        loss = functional_call(owner.target, weights, (X,)).square().mean()
        gradients = torch.autograd.grad(loss, tuple(weights.values()), create_graph=True)
        weights = {name: weight - 0.1 * by for (name, weight), by in zip(weights.items(), gradients, strict=True)}
    return functional_call(owner.target, weights, (owner.net(X),)).square().mean()


def _buffer(owner):
    mean = owner.hyper(X.mean(0))[:4].detach()
    return functional_call(owner.norm, {"running_mean": mean}, (owner.net(X),)).square().mean()


@pytest.mark.parametrize("step", [_late, _early, _by_function, _by_gradients, _buffer])
def test_values_may_take_the_place_of_parameters_and_buffers_whichever_stage_has_made_them(step):
    stages = Stages(_parts(), step, num_stages=2)
    assert_equal((stages.run(step), stages.gradients()), run_plainly(_parts(), step))
    stages.close()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_is_traced_by_what_stands_in_the_place_of_its_parameters(is_frozen):
    def step(owner):
        first = owner.target(X)
        weight = owner.hyper(X.mean(0)).view(4, 4)
        return (functional_call(owner.target, {"weight": weight}, (X,)) + owner.net(first)).square().mean()

    def parts():
        made = _parts()
        made.target.requires_grad_(not is_frozen)
        return made

    stages = Stages(parts(), step, num_stages=2)
    assert_equal((stages.run(step), stages.gradients()), run_plainly(parts(), step))
    stages.close()
