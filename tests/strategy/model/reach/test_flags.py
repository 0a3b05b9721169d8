import torch
from torch import nn

from lightning_pfo.strategy.model.reach.flags import Flags, note_backward


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


def trained(model):
    return [parameter.requires_grad for parameter in model.parameters()]


def test_what_a_run_has_trained_is_trained_until_the_next_one():
    model = nn.Linear(2, 2).requires_grad_(False)
    flags = Flags(model)
    flags.begin_run()
    model.requires_grad_(True)
    assert flags.end_run() == ({}, {0: True, 1: True})
    assert trained(model) == [True, True]  # for its backward
    assert flags.has_thawed
    flags.begin_run()
    assert trained(model) == [False, False]
    assert flags.end_run() == ({}, {})
    assert not flags.has_thawed


def test_what_counts_is_how_it_was_where_something_was_differentiated():
    model = nn.Linear(2, 2).requires_grad_(False)
    flags = Flags(model)
    flags.begin_run()
    model.weight.requires_grad_(True)
    note_backward()
    model.requires_grad_(False)
    assert flags.end_run() == ({}, {})
    assert trained(model) == [True, False]
    flags.freeze()
    assert trained(model) == [False, False]
    note_backward()  # no run is under way


def test_what_a_run_freezes_is_trained_again():
    model = nn.Linear(2, 2)
    flags = Flags(model)
    flags.begin_run()
    model.requires_grad_(False)
    assert flags.end_run() == ({}, {0: False, 1: False})
    assert trained(model) == [True, True]
    assert not flags.has_thawed
