import torch
from torch import nn

from lightning_pfo.strategy.engine.work_counter import WorkCounter


def test_a_matrix_product_is_counted_by_hand():
    a, b = torch.randn(4, 8), torch.randn(8, 16)
    with WorkCounter() as counter:
        a @ b
    assert counter.work.flops == 2 * 4 * 8 * 16
    assert counter.work.bytes == 4 * (4 * 8 + 8 * 16 + 4 * 16)


def test_views_move_nothing_and_a_backward_is_twice_the_forward():
    layer = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    with WorkCounter() as views:
        x.t().reshape(8, 4).t()
    assert views.work.bytes == 0
    with WorkCounter() as forward:
        y = layer(x)
    with WorkCounter() as backward:
        y.backward(torch.ones_like(y))
    assert backward.work.flops == 2 * forward.work.flops


def test_a_gradient_that_autograd_has_to_copy_counts_as_one_that_it_takes_over():
    counted = []
    for hold in (False, True):
        weight = torch.ones(8, 8, requires_grad=True)
        held = []
        if hold:
            weight.register_hook(held.append)  # autograd then copies it, as while a thread still sends it
        with WorkCounter() as counter:
            torch.relu(weight).backward(torch.ones(8, 8))
        counted.append(counter.work)
    assert counted[0] == counted[1]
