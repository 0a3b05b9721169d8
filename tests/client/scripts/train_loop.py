"""A pipeline loop of two ranks, with Zeus's client or ours: URL, client, steps; writes what each rank got."""

import json
import logging
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ranks import run_ranks

NUM_MICROBATCHES = 3
ORDERS = {0: "FFBFBB", 1: "FBFBFB"}
NAMES = {"F": "forward", "B": "backward"}


def make_optimizer(client, url, rank):
    arguments = (rank, 0, rank, 0, rank, 1, 2, 1, 2, url)
    if client == "zeus":
        # Only torch is told that there is no CUDA to talk to; zeus is as it was installed.
        torch.cuda.set_device = torch.cuda.synchronize = lambda device=None: None
        torch.cuda.is_available = lambda: True
        from zeus.optimizer.pipeline_frequency import PipelineFrequencyOptimizer

        return PipelineFrequencyOptimizer(*arguments, job_metadata="unmodified")
    from lightning_pfo.client import PipelineFrequencyOptimizer

    return PipelineFrequencyOptimizer(*arguments, "ours", measured_steps=1, first_plan_s=60)


def run_order(optimizer, order):
    for letter in order:
        optimizer.on_instruction_begin(NAMES[letter])
        time.sleep(0.004)
        optimizer.on_instruction_end(NAMES[letter])


def train(client, url, num_steps, output):
    rank = dist.get_rank()
    optimizer, steps = make_optimizer(client, url, rank), []
    try:
        for step in range(num_steps):
            if client == "ours" and step == 1:
                run_order(optimizer, "FF" if rank else "F")  # an evaluation, of which no plan knows anything
            optimizer.on_step_begin()
            run_order(optimizer, ORDERS[rank])
            optimizer.on_step_end()
            dist.barrier()  # a pipeline's ranks are never more than a step apart
            if client == "ours":
                steps.append([step, optimizer.plan.version, optimizer.plan.purpose, optimizer.plan.label])
                if output.with_name("enough").exists() and steps[-1][2] == "plan":
                    break
    finally:
        if client == "zeus":  # else its process stays, and this one waits for it
            optimizer.frequency_controller.end()
        else:
            optimizer.close()
    output.with_name(f"{output.name}-{rank}.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    url, client, num_steps, output = sys.argv[1:]
    run_ranks(train, 2, client, url, int(num_steps), Path(output))
