"""What a hook changes on one rank only, of what all hold; how it is saved is in test_what_is_saved.py."""

import torch
from torch import nn

from lightning_pfo.strategy.state.alike import changed_in, note_alike


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
