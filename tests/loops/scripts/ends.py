"""One rank of a loop ends, in many ways; every other one writes how it ends into FOLDER/WAY_RANK.json."""

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from net import Net
from torch import nn

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from tests.ranks import run_rank

FOLDER = Path(sys.argv[1])
X, Y = torch.zeros(8, 6), torch.zeros(8, dtype=torch.long)
LONGEST_S = 60.0


def be_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    atexit._run_exitfuncs()  # as the end of a script does, which a fork has not
    os._exit(0)


def fail():
    sys.last_value = ValueError("mine")
    leave()


def loop(way, rank, act, num_replicas):
    mine = int(os.environ["RANK"])
    model = PipelinedModel(
        Net(),
        nn.functional.cross_entropy,
        pipeline_module="layers",
        num_microbatches=2,
        data_parallel_size=num_replicas,
    )
    try:
        for step in range(4):
            model.step(X, Y)
            if step == 1 and mine == rank:
                act(model)
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, PfoError) else "foreign"
        (FOLDER / f"{way}_{mine}.json").write_text(json.dumps([kind, str(error)]))
        os._exit(0)


def kill_in_next_step(model):
    layer = next(each for each in model.module.modules() if isinstance(each, nn.Linear) and not each.weight.is_meta)
    layer.register_forward_hook(lambda *arguments: be_killed())


WAYS = {
    "killed": (2, 1, lambda model: be_killed()),
    "killed_in_step": (2, 1, kill_in_next_step),
    "failed": (2, 1, lambda model: fail()),
    "first": (2, 0, lambda model: fail()),
    "replica": (4, 3, lambda model: leave()),
}


def start(way, rank, num_ranks, *arguments):
    pid = os.fork()
    if pid == 0:
        try:
            run_rank(rank, num_ranks, f"file://{FOLDER}/{way}_store", loop, (way, *arguments, num_ranks // 2))
        finally:
            os._exit(1)
    return pid


def end(pids):
    deadline_s = time.monotonic() + LONGEST_S
    for pid in pids:
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


if __name__ == "__main__":
    for name, (num_processes, *how) in WAYS.items():
        end([start(name, rank, num_processes, *how) for rank in range(num_processes)])
