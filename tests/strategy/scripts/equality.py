"""Trains on one device and on a pipeline of four and writes what it saw; usage: equality.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from plain_module import PlainModule, make_loaders

import lightning_pfo  # noqa: F401
from tests.ranks import run_ranks


def main(devices, output):
    strategy = {"strategy": "pfo_pipeline"} if devices > 1 else {}
    L.seed_everything(3)
    torch.set_num_threads(1)
    module = PlainModule(metrics=True)
    train, val = make_loaders(num_samples=101, drop_last=False)  # the last batch of an epoch has five samples
    root = Path(output).with_suffix("")
    checkpoint = ModelCheckpoint(dirpath=root, monitor="val_loss", filename="best")
    early = EarlyStopping("val_loss", patience=5)
    options = dict(
        accelerator="cpu",
        devices=devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy,
    )
    trainer = L.Trainer(
        max_epochs=2, gradient_clip_val=0.3, accumulate_grad_batches=2, callbacks=[checkpoint, early], **options
    )
    trainer.fit(module, train, val)
    result = {
        **module.history,
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
        "best": float(checkpoint.best_model_score),
        "test": trainer.test(module, val, verbose=False),
        "predictions": torch.cat(trainer.predict(module, val)).tolist(),
        "validate_best": trainer.validate(module, val, ckpt_path=checkpoint.best_model_path, verbose=False),
    }
    if trainer.is_global_zero:
        state = torch.load(checkpoint.best_model_path, weights_only=False)
        result["keys"] = list(state["state_dict"])
        result["optimizer_ids"] = sorted(state["optimizer_states"][0]["state"])
        result["weights"] = {k: v.flatten().tolist() for k, v in state["state_dict"].items()}
        Path(output).write_text(json.dumps(result))


for devices in (1, 4):
    run_ranks(main, devices, devices, f"{sys.argv[1]}/{devices}.json")
