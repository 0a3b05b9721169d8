"""The memory that ranks are told of beforehand, against that of all living tensors of an iteration."""

import functools
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn, optim

from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from lightning_pfo.strategy.model.tracing.forms.outline import outline_call
from lightning_pfo.strategy.step.memory.optimizer_trial import try_optimizers
from lightning_pfo.strategy.step.memory.report import MemoryReport, RankMemory
from lightning_pfo.strategy.step.memory.substitutes import NoValues
from lightning_pfo.strategy.step.memory.trial import nothing_remains
from tests.launch import of_ranks, run_script
from tests.strategy.memory_cases import CASES

CPU = torch.device("cpu")
pytestmark = pytest.mark.slow  # 67 s on an idle machine, 315 s at a load of 13
can_divide = pytest.mark.skipif(torch.__version__ < OLDEST_FSDP["cpu"], reason="this torch keeps replicas whole")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    run_script(Path(__file__).parents[1] / "scripts" / "memory.py", folder)
    return of_ranks(folder, 2)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=can_divide if "fully_shard" in case[3] else ()) for name, case in CASES.items()]
)
def test_what_is_told_is_within_ten_percent_of_what_is_taken(ranks, name):
    for seen in ranks:
        assert seen[name]["is_exact"]
        assert seen[name]["expected"] == pytest.approx(seen[name]["measured"], rel=0.1)
        assert sum(seen[name]["parts"].values()) == seen[name]["expected"]


def test_a_loop_of_ones_own_is_told_as_well(ranks):
    for seen in ranks:
        assert seen["loop"]["is_exact"]
        assert seen["loop"]["expected"] == pytest.approx(seen["loop"]["measured"], rel=0.1)


@can_divide
def test_the_report_shows_all_ranks(ranks):
    seen = ranks[0]["divided"]
    lines = seen["text"].splitlines()
    assert seen["ranks"] == 2
    assert lines[1].split() == [
        "rank",
        "parameters",
        "gathered",
        "gradients",
        "optimizer",
        "activations",
        "batch",
        "=",
        "peak",
        "at",
    ]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, 0.1),
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
        lambda p: optim.Adam(p, amsgrad=True),
        lambda p: optim.AdamW(p, foreach=True),
        lambda p: optim.AdamW(p, fused=True),
        optim.Adafactor,
        lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    ],
)
def test_states_of_optimizers_are_known_before_their_first_step(make):
    parameters = [nn.Parameter(torch.randn(60, 50)), nn.Parameter(torch.randn(300))]
    optimizer = make(parameters)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # sets a step of its own
    expected = try_optimizers([optimizer], CPU)
    assert not optimizer.state
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    values = [value for state in optimizer.state.values() for value in state.values()]
    state_bytes = sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
    assert expected.state_bytes == pytest.approx(state_bytes, abs=16)  # numbers of steps


def test_an_optimizer_that_needs_values_is_not_known():
    class Peeks(optim.SGD):
        def step(self, closure=None):
            self.param_groups[0]["params"][0].detach().numpy()

    assert try_optimizers([Peeks([nn.Parameter(torch.ones(2))], 0.1)], CPU).state_bytes is None


def test_what_is_not_known_is_said():
    rank = RankMemory(1000, 0, 1000, None, 2000, 0, 0, "0B1")
    assert rank.peak_bytes == 4000
    text = str(MemoryReport((rank,)).with_measured([4100]))
    assert ">= 4 kB" in text
    assert "?" in text
    assert "4.1 kB" in text
    assert "transfers" not in text


class Remembers(nn.Module):
    """What it computes of its weights is in a cache of the whole process."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    @functools.lru_cache  # noqa: B019
    def doubled(self):
        return 2 * self.weight


def test_nothing_of_a_trial_remains_in_caches():
    module = Remembers()
    with nothing_remains(CPU, module), NoValues().in_place_of(module, []):
        assert type(module.doubled()) is not torch.Tensor
    assert type(module.doubled()) is torch.Tensor
    assert module.doubled().tolist() == [2.0, 2.0]


class NeedsValues(nn.Module):
    """Its result is kept for its own backward."""

    def forward(self, x):
        NeedsValues.last = result = x.exp()
        NeedsValues.made.append(weakref.ref(result.untyped_storage()))
        if result.sum() > 0:
            return result + 1
        return result


def test_what_a_trace_has_run_for_real_is_let_go_of():
    NeedsValues.made, NeedsValues.last = [], None
    outline = outline_call(NeedsValues(), NeedsValues().forward, ((torch.zeros(3, requires_grad=True),), {}), CPU)
    NeedsValues.last = None
    assert outline.from_values
    assert outline.saved_bytes
    del outline  # which has what the module has left
    assert NeedsValues.made[-1]() is None
