"""Steps that count on the size of the batch or fail for other reasons, and losses with dimensions; sizes.py FOLDER"""

import json
import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.register_buffer("rows", torch.zeros(24, 4))
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class AtTheEnd(Plain):
    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = output.square().mean()
        self.rows[8 * batch_idx : 8 * batch_idx + 8] = output.detach()
        return loss


class RightBehindTheLayers(Plain):
    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.rows[8 * batch_idx : 8 * batch_idx + 8] = batch[0]
        return output.square().mean()


class AtTheBegin(Plain):
    def training_step(self, batch, batch_idx):
        first, *others = torch.chunk(batch[0], len(batch[0]) // 4)
        return self.layers(torch.cat([first, *others])).square().mean()


class SharedByAll(Plain):
    """Its batches have a tensor that all samples share, of as many rows as there are samples."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [batch[0], torch.linspace(0.1, 2.0, 8)]

    def training_step(self, batch, batch_idx):
        matrix = batch[1].view(4, 2)
        return (self.layers(batch[0]) @ matrix).square().mean()


class InTheMiddle(Plain):
    def training_step(self, batch, batch_idx):
        output = self.layers[1](self.layers[0](batch[0])) + torch.zeros(8, 1)
        return self.layers[3](self.layers[2](output)).square().mean()


class InALayer(Plain):
    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(8, -1))

    def __init__(self):
        super().__init__()
        self.layers[2] = self.Layer(4, 4)


class InManualOptimization(AtTheBegin):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class InAQueue(Plain):
    """Its pointer begins anew within a batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.ones(16, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        loss = (output @ self.queue.clone().T).square().mean()
        begin = int(self.pointer)
        self.queue[begin : begin + len(output)] = output.detach()
        self.pointer[0] = (begin + len(output)) % len(self.queue)
        return loss


class InEvaluation(Plain):
    def validation_step(self, batch, batch_idx):
        self.seen.append(float(self.layers(batch[0]).view(8, 4).mean()))


class OfOneElement(Plain):
    """Its loss has dimensions, in a dictionary too."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss.reshape(1, 1)} if batch_idx == 1 else loss.reshape(1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen += [*outputs["loss"].shape, 0, outputs["loss"].item()]


class OnAnySize(Plain):
    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).view(5, -1).mean()


class ByValues(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not float(batch[0].sum()) > 1e6:
            raise ArithmeticError("the user's own")
        return loss


class Skips(Plain):
    """Leaves incomplete batches out, by a size that no microbatch has."""

    def training_step(self, batch, batch_idx):
        return None if len(batch[0]) < 8 else super().training_step(batch, batch_idx)


class SkipsLate(Plain):
    """The same, when it has called its layers."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if len(batch[0]) > 2 else None


class InPieces(Plain):
    """Optimizes for each piece of its batch."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for piece in batch[0].split(4):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step([piece], batch_idx))
            self.optimizers().step()


class ReturnsEarly(InPieces):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) == 8:
            super().training_step(batch, batch_idx)


CASES = (
    AtTheEnd,
    RightBehindTheLayers,
    AtTheBegin,
    SharedByAll,
    InTheMiddle,
    InALayer,
    InManualOptimization,
    InAQueue,
    InEvaluation,
    OfOneElement,
    OnAnySize,
    ByValues,
    Skips,
    SkipsLate,
    InPieces,
    ReturnsEarly,
)


def fit(case, strategy, devices):
    module = case()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        **QUIET,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(TensorDataset(DATA), batch_size=8)
    try:
        trainer.fit(module, loader, loader if case is InEvaluation else None)
    except Exception as error:
        return [type(error).__name__, str(error), type(error.__cause__).__name__]
    whole = module if devices == 1 else trainer.strategy.gather_module()
    weights = None if whole is None else [tensor.flatten().tolist() for tensor in whole.state_dict().values()]
    return [weights, module.seen]


def main():
    if "RANK" not in os.environ:
        found = {case.__name__: fit(case, "auto", 1) for case in CASES}
        (FOLDER / "one_device.json").write_text(json.dumps(found))
        return
    found = {case.__name__: fit(case, PfoPipelineStrategy(num_microbatches=4), 2) for case in CASES}
    options = {
        "num_microbatches": 4,
        "split_batch": lambda batch, number: [[x, batch[1]] for x in batch[0].chunk(number)],
    }
    found["SharedByAll, split"] = fit(SharedByAll, PfoPipelineStrategy(**options), 2)
    for case in CASES:
        for options in ({"num_microbatches": 1}, {"num_microbatches": 4, "loss_over": "batch"}):
            name = f"{case.__name__}, {options.get('loss_over', 'one')}"
            found[name] = fit(case, PfoPipelineStrategy(schedule="gpipe", **options), 2)
    (FOLDER / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(found))


run_ranks(main, 1)
run_ranks(main, 2)
