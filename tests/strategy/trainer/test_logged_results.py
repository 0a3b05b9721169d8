"""Lightning's results of `self.log` are moved where they are somewhere else; it warns as on one device."""

from __future__ import annotations

import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.trainer.logged.compat import keep_results_where_they_are
from tests.quiet import QUIET


def test_results_that_are_on_their_device_stay_as_they_are_and_others_are_moved() -> None:
    results = _ResultCollection(training=True)
    with Patches() as patches:
        keep_results_where_they_are(patches)
        results.log("training_step", "loss", torch.tensor(2.0), on_step=True, batch_size=3)
        first = results["training_step.loss"]
        meta = first.meta
        results.log("training_step", "loss", torch.tensor(4.0), on_step=True, batch_size=1)
        assert first.meta is meta, "Lightning has copied what it knows of the name"
        assert first.compute() == 2.5
        assert results.cpu()["training_step.loss"].value == 10.0, "whose device is given by name"
        first.reset()
        results.log("training_step", "loss", torch.tensor(8.0), on_step=True, batch_size=1)
        assert first.value == 8.0
        results.log("training_step", "loss", torch.empty((), device="meta"), on_step=True, batch_size=1)
        assert first.value.device == first.cumulated_batch_size.device == torch.device("meta")


class LogsIntegers(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("index", torch.tensor(batch_idx), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("number", batch_idx, on_step=False, on_epoch=True)
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("num_microbatches", [None, 1, 2])
def test_of_integers_as_tensors_lightning_warns(num_microbatches: int | None) -> None:
    strategy = "auto" if num_microbatches is None else PfoPipelineStrategy(num_microbatches=num_microbatches)
    result.warning_cache.clear()
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(LogsIntegers(), DataLoader(torch.zeros(12, 4), batch_size=4))
    assert trainer.callback_metrics == {"index": 2.0, "number": 1.0}
    texts = [str(warning.message) for warning in said]
    (text,) = [text for text in texts if "floating" in text]
    assert "`self.log('index', ...)` in your `training_step`" in text
