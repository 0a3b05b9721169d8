"""What stands for the Trainer's metrics while a run is on: a dict like others for who keeps it."""

import copy
import io
from types import SimpleNamespace

import torch

from lightning_pfo.strategy.model.reach.metrics import ShowingLogged, shown_logged


def make_trainer():
    connector = SimpleNamespace(_callback_metrics={"loss": torch.tensor(1.0)}, _logged_metrics={})
    return SimpleNamespace(training=True, strategy=None, _logger_connector=connector, _results={"something": 1})


def test_files_and_copies_have_plain_ones():
    metrics = shown_logged(make_trainer())["callback_metrics"]
    file = io.BytesIO()
    torch.save(metrics, file)
    file.seek(0)
    assert dict(torch.load(file, weights_only=True)) == dict(copy.deepcopy(metrics)) == dict(metrics)


def test_what_is_logged_is_there_until_the_step_is_over():
    trainer = make_trainer()
    shown = shown_logged(trainer)
    assert shown_logged(trainer)["callback_metrics"] is shown["callback_metrics"]
    metrics, logged = shown["callback_metrics"], shown["logged_metrics"]
    log = ShowingLogged(lambda *args, **kwargs: None, shown)
    log("loss", torch.tensor([3.0]), on_epoch=True)
    log("count", 2, logger=False)
    log("of_epoch", 5.0, on_step=False)
    assert (metrics["loss"], len(metrics)) == (1.0, 1)  # until Lightning is asked
    metrics.update({"loss": torch.tensor(2.0)})
    logged.update({})
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 3.0, "loss_step": 3.0, "count": 2.0}
    assert list(logged) == ["loss_step"]
    log.close()
    metrics.update({})
    assert {name: float(value) for name, value in metrics.items()} == {"loss": 2.0}  # Lightning's
    assert not logged


def test_there_is_none_in_evaluations():
    trainer = make_trainer()
    trainer.training = False
    assert shown_logged(trainer) == {}
