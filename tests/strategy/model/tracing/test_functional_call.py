"""Values that a step puts in the place of a layer's parameters."""

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Holder, Stages, assert_equal, run_plainly

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))


def _parts():
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    return Holder(hyper=nn.Linear(4, 16), net=net, target=nn.Linear(4, 4))


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


@pytest.mark.parametrize("step", [_late, _by_function])
def test_values_may_take_the_place_of_parameters_where_they_are(step):
    stages = Stages(_parts(), step, num_stages=2)
    assert_equal((stages.run(step), stages.gradients()), run_plainly(_parts(), step))
    stages.close()


def test_values_of_another_stage_may_not_and_the_way_out_is_told():
    stages = Stages(_parts(), _early, num_stages=2)
    with pytest.raises(ConfigurationError, match=r"shape \(4, 4\) .*torch\.nn\.functional\.linear"):
        stages.run(_early)
    stages.close()
