"""What a model must have before ranks can hold parts of it."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET


class Lazy(L.LightningModule):
    def __init__(self, is_called):
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Linear(8, 1))
        if is_called:
            with torch.no_grad():
                self.net(torch.randn(2, 4))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(module, num_microbatches):
    strategy = PfoPipelineStrategy(num_microbatches=num_microbatches)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(torch.randn(8, 4), batch_size=4))
    return trainer.global_step


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_parameters_without_a_shape_are_named_with_a_way_out_that_is_true(num_microbatches):
    with pytest.raises(ConfigurationError, match=r"'net.0.weight' has no shape yet.*Call the model once on a batch"):
        train(Lazy(is_called=False), num_microbatches)
    assert train(Lazy(is_called=True), num_microbatches) == 2
