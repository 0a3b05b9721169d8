import torch
from torch import nn

from lightning_pfo.strategy.model.reach.untouched import Flags


def test_flags_are_switched_back_and_switched_elsewhere():
    one, other = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
    for model in (one, other):
        model[2].weight.requires_grad_(False)
    flags, of_other = Flags(one), Flags(other)
    assert flags.take_changes() == ({}, {})
    one.eval()
    one[1].train()
    one[0].requires_grad_(False)
    one[2].requires_grad_(True)
    wanted = [m.training for m in one.modules()], [p.requires_grad for p in one.parameters()]
    changed = flags.take_changes()
    assert all(module.training for module in one.modules())
    assert [p.requires_grad for p in one.parameters()] == [True] * 4 + [False, True]
    of_other.apply(changed)
    assert ([m.training for m in other.modules()], [p.requires_grad for p in other.parameters()]) == wanted


def test_tied_parameters_count_once():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    flags = Flags(model)
    model[0].weight.requires_grad_(False)
    assert len(flags.take_changes()[1]) == 1
    assert isinstance(model[1].weight, torch.Tensor)
    assert model[1].weight.requires_grad
