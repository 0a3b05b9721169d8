"""Lightning's results of `self.log` are moved where they are somewhere else, and only there."""

from __future__ import annotations

import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection

from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.trainer.logged.compat import keep_results_where_they_are


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
