"""Steps that walk over a set, in another order on each rank, as Python does with texts; usage: SCRIPT FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
KINDS = ["sliding", "full", "global"]


ORDER = KINDS.copy()
"""That of this process."""


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, kind):
        return self.linear(x) * (1 + KINDS.index(kind))


class Own(L.LightningModule):
    """One layer is called for each kind, as in models of several kinds of attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rotary, self.layers, self.head = (
            Rotary(),
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            nn.Linear(8, 3),
        )
        self.seen = []

    def places(self, x):
        return {kind: self.rotary(x, kind) for kind in ORDER}

    def training_step(self, batch, batch_idx):
        x = batch[0]
        places = self.places(x)
        for number, layer in enumerate(self.layers):
            x = x + torch.tanh(layer(x + places[KINDS[number % 3]]))
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Operations(Own):
    """No layers, but what the step itself does with what one has come to."""

    def places(self, x):
        x = self.rotary(x, "full")
        return {kind: x * (1 + KINDS.index(kind)) for kind in ORDER}


class Alike(Own):
    """Operations without constants of their own."""

    def places(self, x):
        rotary = self.rotary(x, "full")
        return {kind: rotary + x.roll(KINDS.index(kind), 1) for kind in ORDER}


class Modules(Own):
    """A layer for each kind."""

    def __init__(self):
        super().__init__()
        self.of_kinds = nn.ModuleDict({kind: nn.Linear(8, 8) for kind in KINDS})

    def places(self, x):
        return {kind: self.of_kinds[kind](x).mean(1, keepdim=True) for kind in ORDER}


class Heads(Own):
    """The end of the step, which the last rank runs alone."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({kind: nn.Linear(8, 3) for kind in KINDS})

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        losses = {k: nn.functional.cross_entropy(self.heads[k](x), batch[1]) for k in ORDER}
        for kind in ORDER:
            self.log(kind, losses[kind])
        return {"loss": sum(losses.values()), **{kind: loss.detach() for kind, loss in losses.items()}}


class Towers(Own):
    """Layers of stages come in another order."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleDict({kind: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for kind in KINDS})

    def training_step(self, batch, batch_idx):
        found = {kind: self.towers[kind](batch[0]) for kind in ORDER}
        return nn.functional.cross_entropy(self.head(found["full"] - found["sliding"] * found["global"]), batch[1])


def run(number):
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank:
        ORDER.reverse()
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(24, 8, generator=generator), torch.arange(24) % 3)
    results = {}
    for kind in (Own, Operations, Alike, Modules, Heads, Towers):
        module = kind()
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=PfoPipelineStrategy(num_microbatches=4) if number > 1 else "auto",
            max_epochs=1,
            **QUIET,
        )
        try:
            trainer.fit(module, DataLoader(data, batch_size=8))
        except PfoError as error:
            results[kind.__name__] = str(error)
            continue
        logged = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        results[kind.__name__] = [module.seen, logged]
    (FOLDER / f"{number}_{rank}.json").write_text(json.dumps(results))


for number in (1, 2):
    run_ranks(run, number, number)
