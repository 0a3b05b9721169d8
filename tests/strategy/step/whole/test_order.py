"""To find the order of rows a batch runs before it trains: nothing of that remains."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET


def make_net():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


class Distilled(L.LightningModule):
    """As DINO: a teacher that follows the student within the step, and two views of each sample in one call."""

    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place
        self.student, self.teacher = make_net(), make_net().requires_grad_(False)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            for mine, other in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                if self.in_place:
                    mine.mul_(0.6).add_(other, alpha=0.4)
                else:
                    mine.data = 0.6 * mine.data + 0.4 * other.data
        views = torch.cat([batch, batch.flip(1)])
        wanted, found = self.teacher(views).chunk(2), self.student(views).chunk(2)
        alike = F.normalize(found[0]) @ F.normalize(wanted[1]).T
        return F.cross_entropy(alike / 0.2, torch.arange(len(batch))) + F.mse_loss(found[1], wanted[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.student.parameters(), 0.1)


def weights_after(strategy, in_place):
    torch.manual_seed(0)
    module = Distilled(in_place)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_epochs=1, strategy=strategy, **QUIET)
    trainer.fit(module, DataLoader(1 + 0.1 * torch.randn(24, 8), batch_size=8))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("in_place", [True, False])
def test_a_teacher_that_follows_in_the_step_has_not_moved(in_place):
    strategy = PfoPipelineStrategy(num_microbatches=4, schedule="gpipe", loss_over="batch")
    torch.testing.assert_close(weights_after(strategy, in_place), weights_after("auto", in_place))
