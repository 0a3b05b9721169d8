"""Trains Hugging Face models on 1 and on 3 processes; every rank writes OUTPUT/rank_N_of_DEVICES.json."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks
from tests.strategy import families

PARTITIONS = {"llama": "type:DecoderLayer", "gpt2": "custom:0,1,3,4", "t5": "parameters", "opt": "profile"}
SCHEDULES = {"t5": "interleaved_zero_bubble"}  # stages send each other several differentiable tensors


class Batches(Dataset):
    def __init__(self, family):
        self.data = families.inputs(family, batch_size=16)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {name: value[index] for name, value in self.data.items()}


class Module(L.LightningModule):
    def __init__(self, family):
        super().__init__()
        self.model = families.make(family)
        self.losses = []

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("val_loss", output.loss)
        self.log("val_accuracy", (output.logits.argmax(-1) == batch["labels"]).float().mean())

    def predict_step(self, batch, batch_idx):
        return self.model(**batch).logits

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class BuiltOnMeta(Module):
    def __init__(self):
        super().__init__("gpt2")
        self.model = None

    def configure_model(self):
        if self.model is None:
            with torch.device("meta"):
                self.model = families.make("mistral")


def run(module, family, partition, devices):
    L.seed_everything(3)
    loader = DataLoader(Batches(family), batch_size=8)
    schedule = {"schedule": SCHEDULES[family], "stages_per_rank": 2} if family in SCHEDULES else {}
    strategy = PfoPipelineStrategy(partition=partition, num_microbatches=8 if schedule else 4, **schedule)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy if devices > 1 else "auto",
        max_epochs=2,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        limit_predict_batches=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predictions = torch.cat(trainer.predict(module, loader))
    model = module.model
    held = sum(p.numel() for p in model.parameters() if not p.is_meta)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return {
        "losses": module.losses,
        "metrics": metrics,
        "predictions": predictions.sum((1, 2)).tolist(),
        "held": held,
        "all": sum(p.numel() for p in model.parameters()),
        "tied": head is embeddings,
        "head": [] if head.is_meta else head.sum(1).tolist(),
    }


def plain(devices):
    model, batch = families.make("bert"), families.inputs("bert", batch_size=8)
    if devices > 1:
        model = PipelinedModel(model, num_microbatches=4, partition="type:BertLayer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    held = {name for name, p in model.named_parameters() if not p.is_meta}
    return {"losses": losses, "names": len(held)}


def main(devices, output):
    results = {family: run(Module(family), family, partition, devices) for family, partition in PARTITIONS.items()}
    if devices > 1:
        results["meta"] = run(BuiltOnMeta(), "mistral", "uniform", devices)
    results["plain"] = plain(devices)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    Path(output, f"rank_{rank}_of_{devices}.json").write_text(json.dumps(results))


for num_ranks in (1, 3):
    run_ranks(main, num_ranks, num_ranks, sys.argv[1])
