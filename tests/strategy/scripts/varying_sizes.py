"""Trains models whose sizes depend on values, on one process and on several; writes FOLDER/single.json or rank_N.json.

Two ranks run one of the models by every schedule; all is traced for each microbatch, which takes its time.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.engine import channels
from tests.ranks import run_ranks

IN_CHANNELS = ("interleaved_1f1b", "zbv")
"""Their transfers go through groups by direction, as with nccl."""
WIDTH, LAYERS, EXPERTS = 6, 8, 3


class DropsTokens(nn.Module):
    """A layer that goes on with the tokens that it likes, and knows where they were."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, places):
        keep = x[:, 0] > -0.4
        return x[keep] + self.linear(x[keep]).tanh(), places[keep]


class Tokens(nn.Module):
    """Drops tokens in its layers, and between them by a mask of its own; puts what is left together at the end."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(DropsTokens() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        tokens = self.stem(x).flatten(0, 1)
        whole, kept = tokens, tokens
        places = torch.arange(len(tokens), device=x.device)
        for number, layer in enumerate(self.layers):
            kept, places = layer(kept, places)
            if number == LAYERS // 2:
                few = kept[:, 1] < 0.8
                whole = whole.index_add(0, places[~few], kept[~few])
                kept, places = kept[few], places[few]
        whole = whole.index_add(0, places, kept) + 0 * kept.shape[0]
        return self.head(whole.view(x.shape)).mean(1)


class Experts(nn.Module):
    """Rows stay with their experts over all layers; now and then one of them has none."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.stem(x[:, 0])
        chosen = x[:, :EXPERTS].argmax(-1)
        rows = [(chosen == expert).nonzero()[:, 0] for expert in range(EXPERTS)]
        parts = [x[each] for each in rows]
        for number, layer in enumerate(self.layers):
            parts = [layer(part).tanh() * (1 + (number + e) % 3) for e, part in enumerate(parts)]
        for each, part in zip(rows, parts, strict=True):
            x = x.index_add(0, each, part)
        return self.head(x)


MODELS = {"tokens": Tokens, "experts": Experts}


class Module(L.LightningModule):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(5)
        self.model = MODELS[name]()
        self.losses, self.val_losses = [], []

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self.model(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.val_losses.append(float(self.trainer.callback_metrics["val"]))

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def data():
    x = torch.randn(40, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x.sum((1, 2))[:, None].sin())


def trained(name, strategy, devices):
    module = Module(name)
    loader = torch.utils.data.DataLoader(data(), batch_size=16)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        limit_val_batches=1,
        limit_predict_batches=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader, loader)
    predictions = torch.cat(trainer.predict(module, loader))
    return {"train": module.losses, "val": module.val_losses, "predictions": predictions.flatten().tolist()}


def by_loop(name):
    """A loop of one's own; in `PipelinedModel` if there are several processes."""
    torch.manual_seed(5)
    model = MODELS[name]()
    inputs, targets = data().tensors
    losses = []
    if dist.is_initialized():
        first = inputs[:16], targets[:16]
        pipelined = PipelinedModel(model, nn.functional.mse_loss, num_microbatches=4, example_batch=first)
        optimizer = torch.optim.SGD(pipelined.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for start in (0, 16, 24):
        x, y = inputs[start : start + 16], targets[start : start + 16]
        optimizer.zero_grad()
        if dist.is_initialized():
            losses.append(float(pipelined.step(x, y)))
        else:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses.append(float(loss))
        optimizer.step()
    with torch.no_grad():
        predictions = pipelined.predict(inputs) if dist.is_initialized() else model(inputs)
    return {"train": losses, "predictions": predictions.flatten().tolist()}


def single(folder):
    results = {name: {"trainer": trained(name, "auto", 1), "loop": by_loop(name)} for name in MODELS}
    Path(folder, "single.json").write_text(json.dumps(results))


def pipeline(folder, num_ranks, schedules):
    results = {}
    for name in MODELS:
        results[name] = {}
        for schedule in schedules[name]:
            channels.WITHOUT_QUEUES = frozenset() if schedule in IN_CHANNELS else frozenset({"gloo"})
            check = schedule == "1f1b"  # costs as much as the rest, and the same with each schedule
            strategy = PfoPipelineStrategy(num_microbatches=4, schedule=schedule, check_loss=check)
            results[name][schedule] = trained(name, strategy, num_ranks)
        results[name]["loop"] = by_loop(name)
        try:
            strategy = PfoPipelineStrategy(num_microbatches=4, schedule="gpipe", loss_over="batch")
            results[name]["whole batch"] = trained(name, strategy, num_ranks)
        except ConfigurationError as error:
            results[name]["refused"] = str(error)
    Path(folder, f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


if len(sys.argv) == 2:
    run_ranks(single, 1, sys.argv[1])
else:
    run_ranks(pipeline, int(sys.argv[2]), sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
