"""What a hook changes on one rank only, of what all hold, is saved as that rank has it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.state.alike import changed_in, note_alike
from tests.launch import of_ranks, run_script


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    run_script(Path(__file__).parents[1] / "scripts" / "buffers_in_hooks.py", folder)
    return json.loads((folder / "plain.json").read_text()), of_ranks(folder, 2)[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["saved", "whole", "sharded"])
def test_averages_that_a_hook_follows_in_buffers_are_those_of_one_device(found, kind):
    plain, first = found
    for expected, seen in zip(plain, (first[kind], first[f"{kind}, resumed"]), strict=True):
        assert set(seen) == set(expected)
        for name, values in expected.items():
            assert seen[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


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
