"""Two ranks whose activations wait in the host's memory, or do not; writes OUTPUT/rank_N.json."""

import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy.engine import offload as module
from lightning_pfo.strategy.engine.living_bytes import LivingBytes
from lightning_pfo.strategy.engine.offload import Offload
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
CPU = torch.device("cpu")


class OnDevice(InstructionListener):
    """The memory that is made in a step and not the host's, after each instruction."""

    def __init__(self):
        self.peak, self.most_away, self.on_host = 0, 0, []

    def on_instruction_end(self, event):
        self.on_host = [away for away in self.on_host if away() is not None]
        away = sum(each()._host.nbytes for each in self.on_host)
        self.most_away = max(self.most_away, away)
        self.peak = max(self.peak, self.living.now - away)


def make_layer():
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))


def run(schedule, offloads, autocast=False):
    torch.manual_seed(0)
    net = nn.Sequential(*(make_layer() for _ in range(4)))
    model = PipelinedModel(net, nn.functional.mse_loss, num_microbatches=4, schedule=schedule, check_loss=False)
    engine = model._pipeline.engine
    engine.offload = Offload(CPU) if offloads else None
    seen = OnDevice()
    made, init = [], module._Away.__init__

    def noted(self, *args):
        init(self, *args)
        made.append(self._host.shape)
        seen.on_host.append(weakref.ref(self))

    module._Away.__init__ = noted
    engine.add_listener(seen)
    x, y = torch.randn(2, 1024 if autocast else 256, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    try:
        for _ in range(2):
            model.zero_grad()
            with LivingBytes(CPU) as seen.living, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(float(model.step(x, y)))
    finally:
        module._Away.__init__ = init
    gradients = [p.grad.double().sum().item() for p in model.parameters() if p.grad is not None]
    return {"losses": losses, "gradients": gradients, "peak": seen.peak, "away": seen.most_away, "moved": len(made)}


def main():
    found = {}
    for schedule in ("gpipe", "1f1b", "interleaved_zero_bubble"):
        found[schedule] = [run(schedule, offloads) for offloads in (False, True)]
    found["autocast"] = [run("gpipe", offloads, autocast=True) for offloads in (False, True)]
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 2)
