"""What making a weight changes: once for a batch, as on one device, in each form that torch has for it."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.made_weights import MadeWeights, make_weights_within


class Counts(nn.Module):
    """A parametrization that warms up: in each call it makes more of the weight."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, weight):
        self.calls += 1
        return weight * (1 - 0.5**self.calls)


def counting(layer):
    parametrize.register_parametrization(layer, "weight", Counts())
    return layer


NORMS = {"new": parametrizations.spectral_norm, "older": spectral_norm, "own": counting}


def make_net(norm):
    torch.manual_seed(0)
    return nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 4)))


def run(net):
    """A step that calls the net twice."""
    return net(net(torch.ones(2, 4))).sum()


def buffers_of(net):
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_microbatches_make_the_weights_of_one_device_and_leave_the_same(norm):
    plain, net, patches = make_net(norm), make_net(norm), Patches()
    make_weights_within(net, patches)
    made = MadeWeights(net, (), patches)
    assert made.names == {name for name, _ in net.named_buffers()}
    for _ in range(3):
        expected = run(plain)
        with made.batch():
            for _ in range(4):
                with made.microbatch():
                    assert torch.equal(run(net), expected)
            net(torch.ones(2, 4))  # as where a layer runs again in backward
        assert all(torch.equal(buffer, buffers_of(plain)[name]) for name, buffer in buffers_of(net).items())
    net.eval()
    plain.eval()
    assert torch.equal(run(net), run(plain))
    patches.close()
    net.train()
    plain.train()
    assert torch.equal(run(net), run(plain))


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_copy_that_is_made_within_a_batch_knows_nothing_of_it(norm):
    net, patches = make_net(norm), Patches()
    make_weights_within(net, patches)
    made = MadeWeights(net, (), patches)
    with made.batch(), made.microbatch():
        run(net)
        if norm is spectral_norm:  # of which torch makes no copies where weights have gradients
            net[0].weight, net[2].weight = (layer.weight.detach() for layer in (net[0], net[2]))
        teacher = copy.deepcopy(net)
        run(teacher)
    before = buffers_of(net)
    run(teacher)
    assert all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(net).items())
    assert not all(torch.equal(buffer, before[name]) for name, buffer in buffers_of(teacher).items())


def test_modules_whose_calls_are_followed_and_those_without_buffers_are_left_alone():
    net, patches = make_net(parametrizations.spectral_norm), Patches()
    followed = [module for module in net.modules() if "_u" in dict(module.named_buffers(recurse=False))]
    assert MadeWeights(net, followed, patches).names == set()
    assert MadeWeights(nn.Linear(4, 4), (), patches).names == set()
