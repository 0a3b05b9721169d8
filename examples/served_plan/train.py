"""A pipeline of torch's own that follows the plans of a server; neither Lightning nor our strategy.

    lightning-pfo serve frontier=plans
    torchrun --nproc-per-node 2 examples/served_plan/train.py --server http://127.0.0.1:7787 --microbatches 4

Each rank has a stage of a small model and a GPU, or the CPU where there is none. The stage tells the optimizer when an
instruction begins and ends; that is all that a framework has to do.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_pfo.client import PipelineFrequencyOptimizer

WIDTH = 64


class ToldStage(PipelineStage):
    """A stage that says when its instructions begin and end."""

    optimizer = None

    def forward_one_chunk(self, *args, **kwargs):
        self.optimizer.on_instruction_begin("forward")
        output = super().forward_one_chunk(*args, **kwargs)
        self.optimizer.on_instruction_end("forward")
        return output

    def backward_one_chunk(self, *args, **kwargs):
        self.optimizer.on_instruction_begin("backward")
        super().backward_one_chunk(*args, **kwargs)
        self.optimizer.on_instruction_end("backward")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", default="http://127.0.0.1:7787")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO)

    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()).to(device)
    stage = ToldStage(model, rank, world_size, device)
    schedule = Schedule1F1B(stage, given.microbatches, loss_fn=torch.nn.functional.mse_loss)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    stage.optimizer = PipelineFrequencyOptimizer(
        rank=rank, dp_rank=0, pp_rank=rank, tp_rank=0, device_id=local_rank,
        dp_degree=1, pp_degree=world_size, tp_degree=1, world_size=world_size,
        server_url=given.server, job_metadata="served_plan",
    )  # fmt: skip
    try:
        for step in range(given.steps):
            x = torch.randn(8 * given.microbatches, WIDTH, device=device)
            stage.optimizer.on_step_begin()
            losses = []
            if rank == 0:
                schedule.step(x)
            elif rank == world_size - 1:
                schedule.step(target=torch.zeros_like(x), losses=losses)
            else:
                schedule.step()
            stage.optimizer.on_step_end()
            sgd.step()
            sgd.zero_grad()
            if losses:
                print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    finally:
        stage.optimizer.close()  # clocks are restored
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
