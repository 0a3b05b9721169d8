"""A plain torch loop on a pipeline, with a checkpoint of the whole model.

torchrun --nproc_per_node 2 examples/plain_torch/train.py
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.loops import PipelinedModel


def make_model(width=128, num_blocks=8):
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_blocks)]
    return nn.Sequential(nn.Linear(32, width), *blocks, nn.Linear(width, 10))


def make_loader(batch_size=64):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 32, generator=generator)
    y = (x @ torch.randn(32, 10, generator=generator)).argmax(1)  # labels of a random linear teacher
    return DataLoader(TensorDataset(x, y), batch_size, shuffle=True)


def main(options):
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    model = PipelinedModel(make_model(), nn.functional.cross_entropy, num_microbatches=8, schedule=options.schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = make_loader()
    for epoch in range(options.epochs):
        total = 0.0
        for x, y in loader:  # every rank reads the same batches
            total += model.step(x.to(model.device), y.to(model.device)).item()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {total / len(loader):.4f}", flush=True)
    weights = model.full_state_dict()  # every rank takes part, rank 0 gets it
    if dist.get_rank() == 0:
        Path(options.output).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, options.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="outputs/plain_torch/weights.pt", help="file for the weights")
    parser.add_argument("--schedule", default="1f1b", help="1f1b, gpipe, interleaved_1f1b, zbv, ...")
    parser.add_argument("--epochs", type=int, default=2)
    main(parser.parse_args())
