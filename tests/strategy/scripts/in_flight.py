"""What 4 ranks keep alive during steps, and the orders in which EnvPipe hangs; writes OUTPUT/rank_N.json."""

import json
import sys
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy.engine.stage import Stage
from lightning_pfo.strategy.parallel.groups import Groups
from tests.core.schedules.original_envpipe import hanging_orders, unclamped
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
NUM_RANKS = 4
WIDTH = 64
MICROBATCH = 8
NUM_MICROBATCHES = (8, 12)
SCHEDULES = ("1f1b", "gpipe", "envpipe", "interleaved_1f1b", "zbv")


class Alive:
    """How many of some tensors are alive, and the most at once."""

    def __init__(self):
        self.now = self.peak = 0

    def add(self, thing):
        self.now += 1
        self.peak = max(self.peak, self.now)
        weakref.finalize(thing, self.remove)

    def remove(self):
        self.now -= 1


class Saved:
    """Stands for a tensor that autograd keeps for a backward."""

    def __init__(self, tensor):
        self.tensor = tensor


def make_net(num_layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)))


def make_batch(num_microbatches):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, MICROBATCH * num_microbatches, WIDTH, generator=generator)


class Recorder(InstructionListener):
    def __init__(self):
        self.order = []

    def on_instruction_begin(self, event):
        self.order.append(str(event.instruction))


def measure(schedule, num_microbatches):
    model = PipelinedModel(
        make_net(8), nn.functional.mse_loss, num_microbatches=num_microbatches, schedule=schedule, check_loss=False
    )
    batch = make_batch(num_microbatches)
    model.step(*batch)  # shapes are known from here on
    activations, received = Alive(), Alive()
    make_buffers = Stage.make_buffers

    def counted_buffers(stage, instruction, *shapes):
        buffers = make_buffers(stage, instruction, *shapes)
        for buffer in buffers:
            received.add(buffer)
        return buffers

    def pack(tensor):
        saved = Saved(tensor.detach())  # what autograd saves does not hold on to its graph
        if tensor.shape == (MICROBATCH, WIDTH) and tensor.grad_fn is not None and "Tanh" in tensor.grad_fn.name():
            activations.add(saved)
        return saved

    Stage.make_buffers = counted_buffers
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            model.step(*batch)
    finally:
        Stage.make_buffers = make_buffers
    return {"activations": activations.peak, "received": received.peak, "left": activations.now + received.now}


def gradient_norms(model):
    return [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]


def run_order(k, num_microbatches):
    path = FOLDER / f"order_{'_'.join(map(str, k))}_{num_microbatches}.txt"
    if dist.get_rank() == 0:
        path.write_text(unclamped(k, num_microbatches).grid())
    dist.barrier()
    model = PipelinedModel(
        make_net(4), nn.functional.mse_loss, num_microbatches=num_microbatches, schedule=str(path), check_loss=False
    )
    recorder = Recorder()
    model.instruction_source.add_listener(recorder)
    loss = model.step(*make_batch(num_microbatches))
    return {"loss": float(loss), "norms": gradient_norms(model), "order": recorder.order}


def exchange_between_hosts():
    """What listeners exchange, and over groups of which backend, if the device is a GPU and the world's is nccl."""
    source = PipelinedModel(make_net(4), nn.functional.mse_loss).instruction_source
    source._groups = Groups("cuda")
    source._hosts.clear()
    used, gather = [], dist.all_gather

    def noting(values, value, group):
        used.append("the world's" if group in (None, dist.group.WORLD) else dist.get_backend(group))
        gather(values, value, group=group)

    dist.all_gather = noting
    try:
        values = [source.all_gather(dist.get_rank(), everywhere=everywhere) for everywhere in (False, True, True)]
    finally:
        dist.all_gather = gather
    return {"values": values, "backends": used}


def one_process(num_microbatches):
    net = make_net(4)
    x, y = make_batch(num_microbatches)
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return {"loss": loss.item(), "norms": gradient_norms(net)}


def main():
    rank = dist.get_rank()
    cases = sorted(case for case in hanging_orders() if len(case[0]) == NUM_RANKS)
    results = {
        "measured": {name: {n: measure(name, n) for n in NUM_MICROBATCHES} for name in SCHEDULES},
        "cases": cases,
        "exchanged": exchange_between_hosts(),
        "orders": [run_order(*case) for case in cases],
    }
    if rank == 0:
        results["alone"] = {n: one_process(n) for n in {num_microbatches for _, num_microbatches in cases}}
    (FOLDER / f"rank_{rank}.json").write_text(json.dumps(results))


run_ranks(main, NUM_RANKS)
