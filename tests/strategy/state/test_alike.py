"""What a hook changes on one rank only, of what all hold; how it is saved is in test_what_is_saved.py."""

import json

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.state.alike import changed_in, copy_latest, note_alike, share_changed_buffers
from tests.launch import of_ranks
from tests.ranks import run_ranks


def test_only_what_has_changed_since_all_had_it_is_told():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module.register_buffer("short", torch.ones(3, dtype=torch.bfloat16))
    module.register_buffer("empty", torch.zeros(0))
    module[0].requires_grad_(False)
    assert changed_in(module, module.state_dict()) == frozenset()
    note_alike(module, module.state_dict())
    module.short[1] = 2
    with torch.no_grad():
        module[0].weight += 1
        module[1].weight += 1  # trained
    module[1].running_mean = torch.ones(2)
    changed = {"short", "0.weight", "1.running_mean"}
    assert changed_in(module, module.state_dict()) == changed
    assert changed_in(module, {"short": module.short.to("meta")}) == frozenset()
    note_alike(module)
    assert changed_in(module, module.state_dict()) == frozenset()


def copies(folder):
    """On two ranks: what each has of buffers that one of them, both, or none have changed."""
    rank = dist.get_rank()
    module = nn.Module()
    module.bank = nn.Module()
    for name in ("first", "last", "both", "none", "grown"):
        module.bank.register_buffer(name, torch.zeros(2))
    module.register_buffer("own", torch.zeros(2))
    module.bank.register_parameter("frozen", nn.Parameter(torch.full((2,), float(rank)), requires_grad=False))
    names = list(named_tensors(module))
    shared = [Shared((0, 1), names, [module.bank.frozen], None, None)]
    copy_latest(module, shared, last_rank=1)
    assert module.bank.frozen.tolist() == [0, 0]  # as the first rank has made it
    if rank == 0:
        module.bank.first += 1
        module.own += 1
    else:
        module.bank.last += 2
        module.bank.grown = torch.ones(3)
        module.bank.frozen.data += 5
    module.bank.both += 3 + rank
    share_changed_buffers(module, shared, last_rank=1)
    found = {name: tensor.tolist() for name, tensor in named_tensors(module).items()}
    copy_latest(module, shared, last_rank=1)
    latest = {name: tensor.tolist() for name, tensor in named_tensors(module).items()}
    (folder / f"rank_{rank}.json").write_text(json.dumps([found, latest]))


def test_what_ranks_have_changed_reaches_all_who_hold_it(tmp_path):
    run_ranks(copies, 2, tmp_path)
    first, last = of_ranks(tmp_path, 2)
    expected = {"first": [1, 1], "last": [2, 2], "both": [4, 4], "none": [0, 0], "grown": [1, 1, 1]}
    for found, latest in (first, last):
        assert {name: found[f"bank.{name}"] for name in expected} == expected
        assert {name: latest[f"bank.{name}"] for name in expected} == expected
        assert latest["own"] == [1, 1]
        assert latest["bank.frozen"] == [5, 5]
    assert (first[0]["own"], last[0]["own"]) == ([1, 1], [0, 0])  # which is an attribute
    assert (first[0]["bank.frozen"], last[0]["bank.frozen"]) == ([0, 0], [5, 5])  # and no buffer
