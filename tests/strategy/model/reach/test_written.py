"""Parameters that a step writes into are found, however it does."""

import copy

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.written import WrittenWeights, watch_data
from tests.quiet import QUIET

WAYS = {
    "in place": lambda weight: weight.mul_(0.9),
    "data in place": lambda weight: weight.data.mul_(0.9),
    "other data": lambda weight: setattr(weight, "data", 0.9 * weight.data),
    "detached": lambda weight: weight.detach().mul_(0.9),
    "together": lambda weight: torch._foreach_mul_([weight], 0.9),
    "a part": lambda weight: weight[:1].zero_(),
    "a part of data": lambda weight: weight.data[:1].zero_(),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_is_found_and_nothing_else(way):
    written, other = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    before = vars(nn.Parameter).get("data")  # a pipeline that others have not closed
    with Patches() as patches:
        watch_data(patches)
        watch = WrittenWeights([written, other])
        with watch.watched(), torch.no_grad():
            assert float(other.data.sum()) == 4
            assert not watch.found()
            WAYS[way](written)
        assert [id(each) for each in watch.found()] == [id(written)]
    assert vars(nn.Parameter).get("data") is before


class Teacher(L.LightningModule):
    """Follows its student in some batches only."""

    def __init__(self, moves):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.moves, self.losses = moves, []

    def training_step(self, batch, batch_idx):
        if batch_idx in self.moves:
            for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                q.data.lerp_(p.data, 0.5)
        return (self.student(batch) - self.teacher(batch.flip(1))).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), lr=0.5)


def losses(moves, strategy):
    module = Teacher(moves)
    batches = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(batches, batch_size=8))
    return module.losses


def test_on_one_stage_too_it_is_done_once_for_a_batch_or_refused():
    strategy = PfoPipelineStrategy(num_microbatches=4)
    assert losses((0, 2), strategy) == pytest.approx(losses((0, 2), "auto"), rel=1e-5)
    with pytest.raises(ConfigurationError, match=r"wrote into 'teacher.0.weight' \(.*test_written.py, line \d+\)"):
        losses((1,), PfoPipelineStrategy(num_microbatches=4))
