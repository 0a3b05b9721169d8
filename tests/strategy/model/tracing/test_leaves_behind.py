"""What remains of a stage: ordinary tensors, and stages that have nothing to compute."""

import pytest
import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.dividing.program import programs_of
from lightning_pfo.strategy.model.tracing.stage_run import run_stage
from tests.strategy.model.stages import Followed, assert_equal, run_cut, run_plainly, run_programs
from tests.strategy.model.tracing.cases import CASES, Block, Case, chain


def outputs(name, place):
    owner, step = CASES[name].make()
    followed = Followed(owner, step, 2)
    try:
        trace = followed.trace()
        found = run_cut(owner, followed.step, trace, [place(trace)])
    finally:
        followed.close()
    return found, run_plainly(owner, step)


def test_a_step_returns_ordinary_tensors():
    (output, _), _ = outputs("dicts", lambda trace: len(trace.events) - 2)
    assert type(output["logits"]) is torch.Tensor


class Keeps(Block):
    """A layer that keeps what it returns, as many do to look at it, with something noted in it."""

    def forward(self, x):
        self.out = super().forward(x)
        self.out.noted = 3
        return self.out


@pytest.mark.parametrize("trains", [True, False])
def test_what_layers_keep_are_ordinary_tensors(trains):
    owner, step = Case(chain, None, {"layer": Keeps}).make()
    followed = Followed(owner, step, 2)
    try:
        trace = followed.trace()
        with torch.set_grad_enabled(trains):
            run_programs(programs_of(trace, [2]), [followed.step, followed.step], train=trains)
    finally:
        followed.close()
    kept = [layer.out for layer in owner.layers]
    assert len(kept) > 2
    assert all(type(tensor) is torch.Tensor and tensor.__dict__ == {"noted": 3} for tensor in kept)


def test_a_last_stage_may_have_nothing_to_compute():
    assert_equal(*outputs("chain", lambda trace: len(trace.events)))


class MovesABuffer(nn.Module):
    """A codebook: its step moves it between layers, in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.register_buffer("sums", torch.zeros(4))

    def step(self):
        x = self.layers[1](self.layers[0](torch.ones(2, 4)))
        with torch.no_grad():
            self.sums.add_(x.sum(0))
        x = self.layers[2](x + self.sums)
        return (self.layers[3](x) * self.sums).sum()


class Counts(nn.Linear):
    """A layer that returns a buffer that it has moved."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x):
        y = super().forward(x)
        self.sums += y.detach().sum(0)
        return y, self.sums


class ReturnsABuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Counts() for _ in range(4))

    def step(self):
        x, total = torch.ones(2, 4), 0
        for layer in self.layers:
            x, sums = layer(x)
            total = total + (x * sums).sum()
        return total


@pytest.mark.parametrize("make", [MovesABuffer, ReturnsABuffer])
def test_what_is_being_sent_is_not_changed_by_the_next_microbatch(make):
    followed = Followed(make(), lambda owner: owner.step(), 2)
    try:
        trace = followed.trace()
        for cut in range(1, len(trace.events)):
            program, _ = programs_of(trace, [cut])
            sent = run_stage(program, followed.step, ())
            before = [tensor.detach().clone() for tensor in sent]
            run_stage(program, followed.step, ())
            torch.testing.assert_close([tensor.detach() for tensor in sent], before, rtol=0, atol=0)
    finally:
        followed.close()
