"""What the training scripts of these tests share."""

import resource
import sys
from pathlib import Path

import lightning as L

from lightning_pfo.strategy import PfoPipelineStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "strategy" / "scripts"))
from plain_module import PlainModule, make_loaders

DEVICES = 2


class FullDisk(L.Callback):
    """No file can be written from the begin of a training to its end, or to some batch of it."""

    def __init__(self, until_batch=None):
        self._until_batch = until_batch

    def on_train_start(self, trainer, pl_module):
        self._usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, self._usual[1]))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == self._until_batch:
            resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)

    def on_fit_end(self, trainer, pl_module):
        resource.setrlimit(resource.RLIMIT_FSIZE, self._usual)


def fit(
    callbacks,
    max_steps=6,
    strategy=None,
    module=None,
    devices=DEVICES,
    ckpt_path=None,
    train_dataloaders=None,
    val_dataloaders=None,
    **options,
):
    L.seed_everything(3)
    module = module or PlainModule(width=32, num_layers=5)
    train = train_dataloaders or make_loaders(num_samples=64, batch_size=16)[0]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy or PfoPipelineStrategy(num_microbatches=4),
        max_steps=max_steps,
        callbacks=callbacks,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": False, "enable_checkpointing": False, **options},
    )
    trainer.fit(module, train, val_dataloaders, ckpt_path=ckpt_path)
    return trainer, module
