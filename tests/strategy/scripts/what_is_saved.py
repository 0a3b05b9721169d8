"""What checkpoints have on two ranks and on one device; writes OUTPUT/rank_N.json.

The module has an average of weights in buffers, which a hook follows, and a network among its hyperparameters.
"""

import json
import logging
import sys
import warnings
from inspect import signature
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
found_later = {}


class Average(nn.Module):
    """As LitEma of latent diffusion."""

    def __init__(self, model):
        super().__init__()
        self.names = {name: name.replace(".", "") for name, _ in model.named_parameters()}
        for name, parameter in model.named_parameters():
            self.register_buffer(self.names[name], parameter.detach().clone())
        self.register_buffer("count", torch.tensor(0))

    @torch.no_grad()
    def forward(self, model):
        parameters, buffers = dict(model.named_parameters()), dict(self.named_buffers())
        self.count += 1
        for name, parameter in parameters.items():
            average = buffers[self.names[name]].type_as(parameter)
            average.sub_(0.5 * (average - parameter))


def make_net():
    net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    net[0].register_buffer("scale", torch.ones(8), persistent=False)
    return net


class Queue(nn.Module):
    """Filled by a method, as a memory bank of contrastive learning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(4))

    def put(self, rows):
        self.rows = self.rows + rows


class Module(L.LightningModule):
    def __init__(self, net, loss, rate=0.5):
        super().__init__()
        self.queue = Queue()
        self.save_hyperparameters(logger=False)
        self.net = net
        self.average = Average(self.net)

    def training_step(self, batch, batch_idx):
        output = self.net(batch)
        self.queue.put(output.detach().sum(0)[:4])
        return self.hparams.loss(output, torch.zeros_like(batch))

    def validation_step(self, batch, batch_idx):
        average = [buffer for name, buffer in self.average.named_buffers() if name.startswith("3")]
        parts = {"net": self.net(batch).mean(), "queue": self.queue.rows.sum(), "average": sum(map(torch.sum, average))}
        self.log_dict(parts)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average(self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


def averages_of(state):
    return {name: value.flatten().tolist() for name, value in state.items() if name.startswith(("average", "queue"))}


def read(path):
    """The averages in a file, and the network that a module is made from."""
    index = path / "meta.pt" if path.is_dir() else path
    saved = torch.load(index, weights_only=False)
    net = saved["hyper_parameters"]["net"]
    weights = {name: value.flatten().tolist() for name, value in net.state_dict().items()}
    weights["scale"] = net[0].scale.tolist()
    again = {} if path.is_dir() else Module.load_from_checkpoint(path, weights_only=False).net.state_dict()
    return {
        "averages": averages_of(saved.get("state_dict", {})),
        "net": weights,
        "loaded": {name: value.flatten().tolist() for name, value in again.items()},
        "loss": type(saved["hyper_parameters"]["loss"]).__name__,
        "knows_us": b"_pfo_split" in index.read_bytes(),
    }


def train(kind, max_epochs, path=None):
    options = {"devices": 1}
    if kind != "plain":
        strategy = PfoPipelineStrategy(num_microbatches=2, save_distributed_checkpoint=kind == "sharded")
        options = {"devices": 2, "strategy": strategy}
    L.seed_everything(0, verbose=False)
    trainer = L.Trainer(accelerator="cpu", max_epochs=max_epochs, **QUIET, **options)
    batches = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    trusted = {"weights_only": False} if "weights_only" in signature(trainer.fit).parameters else {}  # Lightning 2.6
    trainer.fit(Module(make_net(), nn.MSELoss()), DataLoader(batches, 8), ckpt_path=path, **trusted)
    saved = FOLDER / f"{kind}_{max_epochs}.ckpt"
    trainer.save_checkpoint(saved)
    if max_epochs == 2:  # another phase finds what training has left
        values = trainer.validate(trainer.lightning_module, DataLoader(batches, 8), verbose=False)
        saved_later = FOLDER / f"{kind}_validated.ckpt"
        trainer.save_checkpoint(saved_later)
        if trainer.is_global_zero:
            found_later[kind] = {"values": values, "averages": read(saved_later)["averages"]}
    return saved, None if kind == "plain" else trainer.strategy.gather_module()


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    for kind in ("full", "sharded"):
        path, whole = train(kind, 2)
        again, resumed = train(kind, 3, path)
        if dist.get_rank() == 0:
            wholes = [averages_of(each.state_dict()) for each in (whole, resumed)]
            found[kind] = [{**read(each), "whole": of} for each, of in zip((path, again), wholes, strict=True)]
            found["notes"] = [name for each in whole.modules() for name in vars(each) if name.startswith("_pfo_")]
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found | {"later": found_later}))


def alone():
    warnings.filterwarnings("ignore")
    found = [read(train("plain", number)[0]) for number in (2, 3)]
    (FOLDER / "plain.json").write_text(json.dumps([*found, found_later["plain"]]))


run_ranks(alone, 1)
run_ranks(main, 2)
