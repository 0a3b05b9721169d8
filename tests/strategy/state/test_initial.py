"""All processes begin with the first one's values, as under DDP."""

import torch
from torch import nn

from tests.launch import of_ranks, run_script

SCRIPT = """
import json, sys
import torch
import torch.distributed as dist
from pathlib import Path
from tests.ranks import run_ranks
from tests.strategy.state.test_initial import state_of, make
from lightning_pfo.strategy.state.initial import copy_first_values

def main():
    rank, found = dist.get_rank(), {}
    for case in ("seeds", "alone", "meta", "alike"):
        model = make(0 if case == "alike" else rank if case == "seeds" else 0)
        if case == "alone" and rank == 0:  # who alone has loaded a checkpoint
            model.load_state_dict(make(7).state_dict())
        if case == "meta" and rank == 1:
            model[0].to("meta")
        copy_first_values(model, None)
        found[case] = state_of(model)
    (Path(sys.argv[1]) / f"rank_{rank}.json").write_text(json.dumps(found))

run_ranks(main, 3)
"""


class Odd(nn.Module):
    """Tensors of many types, and one that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.turned = nn.Parameter(torch.randn(4, 2).t())
        self.scale = nn.Parameter(torch.randn(()).bfloat16())
        self.register_buffer("count", torch.randint(0, 99, (2,)))
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("small", torch.randn(5).to(torch.float8_e4m3fn))


def make(seed):
    torch.manual_seed(seed)
    tied = nn.Linear(3, 3)
    return nn.Sequential(nn.Linear(3, 3), Odd(), tied, tied)


def state_of(model):
    def numbers(value):
        return torch.view_as_real(value) if value.is_complex() else value.float()

    return {name: [] if value.is_meta else numbers(value).tolist() for name, value in model.state_dict().items()}


def test_processes_begin_with_the_first_ones_values(tmp_path):
    (script := tmp_path / "script.py").write_text(SCRIPT)
    run_script(script, tmp_path)
    expected = {"seeds": state_of(make(0)), "alone": state_of(make(7)), "alike": state_of(make(0))}
    for rank, found in enumerate(of_ranks(tmp_path, 3)):
        meta = found.pop("meta")
        assert found == expected
        assert meta == state_of(make(0)) | ({"0.weight": [], "0.bias": []} if rank == 1 else {})
