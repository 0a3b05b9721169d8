"""Ranks of a process group as forks of a script that has imported all it needs: cheaper than a launcher."""

import os
import tempfile

import torch.distributed as dist
from torch import multiprocessing


def run_ranks(function, num_ranks):
    """Call `function(rank)` in `num_ranks` processes with a gloo group; the first exception ends all."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            _run, args=(function, num_ranks, f"file://{folder}/store"), nprocs=num_ranks, start_method="fork"
        )


def _run(rank, function, num_ranks, init_method):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks)
    function(rank)
    dist.barrier()
    dist.destroy_process_group()
