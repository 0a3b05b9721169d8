import torch
from torch import nn

from lightning_pfo.strategy.step.gradients import (
    attach_gradients,
    put_gradients,
    take_gradients,
    without_hooks,
)


def test_gradients_are_handed_out_by_backward_times_its_factor():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad = torch.ones(2)
    earlier = take_gradients([a, b])
    assert a.grad is None
    gradients = {a: torch.tensor([2.0, 4.0])}
    put_gradients([a, b], earlier)
    loss = attach_gradients(torch.tensor(3.0), gradients)
    assert float(loss) == 3.0
    assert torch.equal(a.grad, torch.ones(2))
    (loss / 2).backward()
    assert torch.equal(a.grad, torch.tensor([2.0, 3.0]))
    assert b.grad is None


def test_hooks_of_parameters_change_the_gradient_of_the_batch():
    clamped, doubled = (nn.Parameter(torch.ones(2)) for _ in range(2))
    clamped.register_hook(lambda gradient: gradient.clamp(max=3.0))
    clamped.register_hook(lambda gradient: seen.append(gradient.tolist()))
    doubled.register_hook(lambda gradient: gradient * 2)
    seen = []
    with without_hooks([clamped, doubled]):
        for _ in range(3):
            (clamped * torch.tensor([1.0, 2.0]) + doubled).sum().backward()
    assert not seen
    loss = attach_gradients(torch.tensor(1.0), take_gradients([clamped, doubled]))
    (loss * 0.5).backward()
    assert seen == [[1.5, 3.0]]
    assert clamped.grad.tolist() == [1.5, 3.0]
    assert doubled.grad.tolist() == [3.0, 3.0]
    (10 * clamped).sum().backward()
    assert seen[1:] == [[3.0, 3.0]]


def test_hooks_on_added_up_gradients_see_those_of_the_batch():
    parameter, seen = nn.Parameter(torch.ones(1)), []
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad)))
    with without_hooks([parameter]):
        for _ in range(3):
            (parameter * 2).sum().backward()
    assert not seen
    loss = attach_gradients(torch.tensor(1.0), take_gradients([parameter]))
    loss.backward()
    assert seen == [6.0]
    parameter.sum().backward()
    assert seen == [6.0, 7.0]
