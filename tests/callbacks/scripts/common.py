"""What the training scripts of these tests share."""

import sys
from pathlib import Path

import lightning as L

from lightning_pfo.strategy import PfoPipelineStrategy

sys.path.insert(0, str(Path(__file__).parents[2] / "strategy" / "scripts"))
from plain_module import PlainModule, make_loaders

DEVICES = 2


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
