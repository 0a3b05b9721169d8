"""Processes as forks of a script that has imported all it needs: imports cost more than most tests."""

import os
import tempfile

import torch.distributed as dist
from torch import multiprocessing


def run_ranks(function, num_ranks, *arguments):
    """Call `function(*arguments)` in `num_ranks` processes, as torchrun would start them; an exception ends all.

    The processes of several ranks have a gloo group. A single one has none.
    """
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.start_processes(
            run_rank, (num_ranks, f"file://{folder}/store", function, arguments), nprocs=num_ranks, start_method="fork"
        )


def run_rank(rank, num_ranks, init_method, function, arguments):
    """Call `function(*arguments)` as one of `num_ranks` processes."""
    if num_ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": "forked"}
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=num_ranks)
    function(*arguments)
    if dist.is_initialized():
        # kept, so that none of gloo's threads has to end it: it waits for Python's lock then (seen in torch 2.6, where
        # the compiler was imported), which who destroys the group holds until all threads have ended
        last = dist.barrier(async_op=True)
        last.wait()
        dist.destroy_process_group()
        del last
