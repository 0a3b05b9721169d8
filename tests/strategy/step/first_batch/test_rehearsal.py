import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET


class Ends(L.LightningModule):
    """Is ended while its first batch is compared, which runs without gradients."""

    def __init__(self, ending):
        super().__init__()
        self.net, self.ending, self.steps = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), ending, 0

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if not torch.is_grad_enabled():
            raise self.ending
        return loss

    def on_train_batch_end(self, *args):
        self.steps += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_step_that_is_compared_ends_the_run(ending):
    module = Ends(ending)
    strategy = PfoPipelineStrategy(num_microbatches=2)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with pytest.raises(SystemExit):
        trainer.fit(module, DataLoader(torch.randn(16, 4), batch_size=4))
    assert module.steps == 0
