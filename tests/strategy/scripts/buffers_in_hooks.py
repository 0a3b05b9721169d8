"""An average of weights in buffers, which a hook follows, on two ranks and on one device; writes OUTPUT/rank_N.json."""

import json
import logging
import sys
import warnings
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


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.average = Average(self.net)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average(self.net)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


def averages_of(state):
    return {name: value.flatten().tolist() for name, value in state.items() if name.startswith("average")}


def train(kind, max_epochs, path=None):
    options = {"devices": 1}
    if kind != "plain":
        sharded = {"save_distributed_checkpoint": True} if kind == "sharded" else {}
        options = {"devices": 2, "strategy": PfoPipelineStrategy(num_microbatches=2, **sharded)}
    L.seed_everything(0, verbose=False)
    trainer, module = L.Trainer(accelerator="cpu", max_epochs=max_epochs, **QUIET, **options), Module()
    batches = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(batches, 8), ckpt_path=path)
    saved = FOLDER / f"{kind}_{max_epochs}.ckpt"
    trainer.save_checkpoint(saved)
    whole = None if kind == "plain" else trainer.strategy.gather_module()
    return saved, None if whole is None else averages_of(whole.state_dict())


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found = {}
    for kind in ("whole", "sharded"):
        path, found[kind] = train(kind, 2)
        again, found[f"{kind}, resumed"] = train(kind, 3, path)
        if kind == "whole" and dist.get_rank() == 0:
            saved = [torch.load(each, weights_only=True)["state_dict"] for each in (path, again)]
            found["saved"], found["saved, resumed"] = map(averages_of, saved)
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


def alone():
    warnings.filterwarnings("ignore")
    paths = [train("plain", number)[0] for number in (2, 3)]
    found = [averages_of(torch.load(path, weights_only=True)["state_dict"]) for path in paths]
    (FOLDER / "plain.json").write_text(json.dumps(found))


run_ranks(alone, 1)
run_ranks(main, 2)
