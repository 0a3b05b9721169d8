"""How often a Trainer is asked for the places that a step names."""

import lightning.pytorch as pl
import pytest
from torch import nn

from lightning_pfo.strategy.model.reach import places
from lightning_pfo.strategy.model.reach.places import Places


class Looks(pl.Callback):
    """Its code names more of the Trainer than the step."""

    def look(self, trainer):
        return trainer.datamodule


class Logs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch):
        self.log("mean", batch.mean())
        return self.layer(batch).sum()


class Calls(Logs):
    def training_step(self, batch):
        self.trainer.callbacks[0].look(self.trainer)
        return super().training_step(batch)


@pytest.fixture
def asked(monkeypatch):
    found, ordinary = [], places.others_of
    monkeypatch.setattr(places, "others_of", lambda owner, named: found.append(owner) or ordinary(owner, named))
    return found


@pytest.mark.parametrize(("kind", "times"), [(Logs, 1), (Calls, 2)])
def test_the_trainer_is_asked_again_only_where_further_code_is_found(kind, times, asked):
    owner, data = kind(), pl.LightningDataModule()
    callback = Looks()
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    owner.trainer = pl.Trainer(accelerator="cpu", callbacks=[callback], **options)
    owner.trainer.datamodule = data
    found = Places(owner)
    assert len(asked) == times
    assert (callback in found.holders.values()) == (times > 1)
