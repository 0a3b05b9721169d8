"""What has to stay on one stage does: boundaries are elsewhere, and are refused if they are not."""

import copy

import pytest
import torch

from lightning_pfo.core.errors import ConfigurationError
from tests.strategy.model.stages import Followed, Stages, assert_equal, run_cut, run_plainly
from tests.strategy.model.tracing.cases import Case
from tests.strategy.model.tracing.test_every_cut import check_case

GRADIENT = r"torch\.autograd\.grad in a step can only .*test_together\.py"


def gradient_by_a_value(net, x, y):
    x = net.stem(x)
    for layer in net.layers[:2]:
        x = layer(x)
    energy = net.layers[3](net.layers[2](x)).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    for layer in net.layers[4:]:
        force = layer(force)
    return net.loss(x + force, y)


def gradient_that_may_be_missing(net, x, y, unused=()):
    x = net.stem(x)
    gradients = torch.autograd.grad(net.layers[0](x).sum(), [x, *unused], create_graph=True, allow_unused=True)
    for layer in net.layers[1:]:
        x = layer(x)
    return net.loss(x, y) + sum(gradient.square().mean() for gradient in gradients if gradient is not None)


def gradient_that_is_missing(net, x, y):
    return gradient_that_may_be_missing(net, x, y, [net.scale * 2])


def gradient_by_a_tensor_of_the_step(net, x, y):
    """The batch's tensor goes to the second layer too, beside what the first has made of it."""
    x = x.clone().requires_grad_()
    shifted = 2 * x
    h = net.layers[1](net.layers[0](shifted) + x)
    (force,) = torch.autograd.grad(h.square().sum(), x, create_graph=True)
    for layer in net.layers[2:]:
        h = layer(h + force)
    return net.loss(h, y)


def gradient_by_a_weight(net, x, y):
    x = net.layers[0](net.stem(x))
    weight = net.layers[0].linear.weight
    (gradient,) = torch.autograd.grad(net.layers[1](x).square().sum(), weight, create_graph=True)
    x = x + gradient.square().mean()
    for layer in net.layers[2:]:
        x = layer(x)
    return net.loss(x, y)


def gradient_over_a_way_beside(net, x, y):
    """What crosses the boundary leads back to what the gradient is by, and is another value."""
    x = net.stem(x)
    z = net.layers[0](x)
    x = x * 2
    for layer in net.layers[1:5]:
        z = layer(z)
    (gradient,) = torch.autograd.grad((z * x).sum(), x, create_graph=True)
    return net.loss(net.layers[5](gradient), y)


def buffer_that_is_read_before_it_is_changed(net, x, y):
    x = net.stem(x) + net.mean
    x = net.layers[1](net.layers[0](x))
    with torch.no_grad():
        net.mean.lerp_(x.mean(0), 0.5)
    for layer in net.layers[2:]:
        x = layer(x)
    return net.loss(x, y)


def batch_norm_of_two_modes(net, x, y):
    x = net.norm(net.stem(x))
    x = net.layers[1](net.layers[0](x))
    net.norm.eval()
    x = net.norm(x)
    net.norm.train()
    for layer in net.layers[2:]:
        x = layer(x)
    return net.loss(x, y)


def layers_in_vmap(net, x, y):
    x = torch.vmap(net.stem)(x)
    for layer in net.layers:
        x = torch.vmap(lambda row, layer=layer: layer(row) + row)(x)
    return net.loss(x, y)


def layers_in_a_gradient(net, x, y):
    x = net.stem(x)
    x = torch.func.grad(lambda each: net.layers[1](net.layers[0](each)).square().sum())(x)
    for layer in net.layers[2:]:
        x = layer(x)
    return net.loss(x, y)


def gradient_before_its_layers_are_called(net, x, y):
    x = net.stem(x)
    slope = torch.vmap(torch.func.grad(lambda row: net.layers[1](net.layers[0](row)).square().sum()))(x.detach())
    for layer in net.layers:
        x = layer(x)
    return net.loss(x, y) + slope.square().mean()


TOGETHER = {
    step.__name__: (step, refused)
    for step, refused in (
        (gradient_by_a_value, GRADIENT),
        (gradient_that_may_be_missing, GRADIENT),
        (gradient_by_a_tensor_of_the_step, GRADIENT),
        (gradient_by_a_weight, GRADIENT),
        (gradient_over_a_way_beside, GRADIENT),
        (buffer_that_is_read_before_it_is_changed, r"'mean' is changed by what one stage.*test_together\.py"),
        (
            batch_norm_of_two_modes,
            r"'norm' changes its buffers.*uses them without a change in another",
        ),
        (layers_in_vmap, None),
        (layers_in_a_gradient, None),
        (gradient_before_its_layers_are_called, None),
    )
}


def make(name):
    step, refused = TOGETHER[name]
    case = Case(step, refused, {})
    owner, run = case.make()
    owner.register_buffer("mean", torch.zeros(6))
    owner.norm = torch.nn.BatchNorm1d(6)
    return case, owner, run


@pytest.mark.parametrize("name", TOGETHER)
def test_what_stays_together_is_equal_or_refused_however_it_is_cut(name):
    case, owner, step = make(name)
    expected = run_plainly(copy.deepcopy(owner), step)
    followed = Followed(copy.deepcopy(owner), step, 2)
    try:
        trace = followed.trace()
        assert trace.failure is None
        equal = []
        for place in range(1, len(trace.events)):
            followed.owner.load_state_dict(owner.state_dict())
            equal.append(
                check_case(lambda at=place: run_cut(followed.owner, followed.step, trace, [at]), case, expected)
            )
    finally:
        followed.close()
    assert any(equal)
    assert all(equal) == (case.refused is None)


@pytest.mark.parametrize("name", TOGETHER)
def test_boundaries_are_where_nothing_stands_against_them(name):
    _, owner, step = make(name)
    expected = run_plainly(copy.deepcopy(owner), step)
    stages = Stages(owner, step, num_stages=2)
    try:
        assert_equal((stages.run(), stages.gradients()), expected)
        assert 1 <= stages.splits[0].boundaries[1] <= 5
    finally:
        stages.close()


def test_gradients_that_are_missing_are_refused():
    """A trace cannot tell."""
    owner, step = Case(gradient_that_is_missing, None, {}).make()
    stages = Stages(owner, step, num_stages=2)
    try:
        with pytest.raises(ConfigurationError, match=rf"{GRADIENT}.*one module") as refused:
            stages.run()
    finally:
        stages.close()
    assert "found no way between them" in str(refused.value)


def penalty_over_the_model(net, x, y):
    x = x.requires_grad_()
    h = net.stem(x)
    for layer in net.layers:
        h = layer(h)
    (gradient,) = torch.autograd.grad(net.head(h).sum(), x, create_graph=True)
    return net.loss(h, y) + gradient.square().mean()


def test_a_penalty_over_the_whole_model_is_refused():
    owner, step = Case(penalty_over_the_model, None, {}).make()
    with pytest.raises(ConfigurationError, match=rf"{GRADIENT}.*fewer stages"):
        Stages(owner, step, num_stages=2)


def layers_in_vjp(net, x, y):
    h, pull = torch.func.vjp(lambda each: net.layers[1](net.layers[0](each)), net.stem(x))
    return net.loss(net.layers[2](pull(torch.ones_like(h))[0]), y)


def test_a_function_that_differentiates_later_is_refused_with_its_line():
    owner, run = Case(layers_in_vjp, None, {}).make()
    with pytest.raises(ConfigurationError, match=r"torch\.func\.vjp .*test_together\.py.*torch\.func\.grad or jvp"):
        Stages(owner, run, num_stages=2)
