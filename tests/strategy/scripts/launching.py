"""Trains in processes that are started in many ways, and die in many ways; usage: launching.py PART FOLDER.

Parts: `forks` (SLURM, deaths, all forked from this process; and spawned ones), `clones`, `clones_of_threads`, `node`
(under torchrun).
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import lightning as L
import torch
from plain_module import PlainModule, make_loaders
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.watch.connection import Address
from lightning_pfo.strategy.watch.rank_watch import RankDiedError, RankWatch
from lightning_pfo.strategy.watch.stuck import Waits

FOLDER = Path(sys.argv[2])


def loaders():
    train, val = make_loaders(num_samples=48, batch_size=12)
    return DataLoader(train.dataset, batch_size=12), val  # not shuffled


def make_trainer(devices, start_method="popen", epochs=2, **options):
    return L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=PfoPipelineStrategy(num_microbatches=4, check_loss=False, start_method=start_method),
        **options,
    )


class Module(PlainModule):
    """Does something in the fourth batch, the last of the first epoch, on one rank."""

    def __init__(self, rank=None, act=None):
        super().__init__()
        self.rank, self.act = rank, act

    def on_before_zero_grad(self, optimizer):
        if self.trainer.global_step == 3 and self.trainer.global_rank == self.rank:
            self.act()


def fork(function, *arguments, **environment):
    pid = os.fork()
    if pid == 0:
        os.environ.update(environment)
        status = 0
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush()
        os._exit(status)
    return pid


def wait_for(pids, timeout_s=90):
    """Exit codes; None for those that had to be killed."""
    codes = {}
    deadline = time.monotonic() + timeout_s
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


# ---- SLURM ----


def slurm_task():
    L.seed_everything(3, verbose=False)
    runs = []
    for _ in range(2):
        L.seed_everything(3, verbose=False)
        module = Module(rank=1, act=lambda: os.kill(os.getpid(), signal.SIGUSR1))
        trainer = make_trainer(2, default_root_dir=FOLDER)
        trainer.fit(module, *loaders())
        runs.append(module.history["train"])
        module.act = None  # requeued once
    environment = type(trainer.strategy.cluster_environment).__name__
    (FOLDER / f"slurm_{trainer.global_rank}.json").write_text(json.dumps({"runs": runs, "environment": environment}))


def slurm(port):
    bin_folder = FOLDER / "bin"
    bin_folder.mkdir()
    scontrol = bin_folder / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {FOLDER}/scontrol.log\n")
    scontrol.chmod(0o755)
    common = {
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_JOB_ID": "4321",
        "SLURM_JOB_NAME": "train",
        "MASTER_PORT": port,
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
    }
    tasks = [fork(slurm_task, **common, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in (0, 1)]
    print("slurm", wait_for(tasks), flush=True)


# ---- deaths ----


def fail():
    raise ValueError("the user's own mistake")


def deaths():
    ways = {
        "killed": (1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
        "left": (2, lambda: os._exit(0)),
        "failed": (2, fail),
        "hub": (0, lambda: os._exit(9)),
    }
    for name, (rank, act) in ways.items():
        print(f"== {name}", flush=True)
        begin = time.monotonic()
        try:
            make_trainer(3, "fork").fit(Module(rank, act), *loaders())
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
        print(f"took {time.monotonic() - begin:.1f} s", flush=True)


def watched(rank, read_end, script):
    """A rank whose transfers cannot be broken off; `script` is what it does in its run."""
    watch = RankWatch(rank, 3, Waits(lambda: None), grace_s=20 if script is begin_again else 0.5)
    if rank == 0:
        address = watch.listen("127.0.0.1", local_only=True)
        for _ in range(2):
            os.write(read_end[1], (json.dumps([address.host, address.port, address.token]) + "\n").encode().ljust(256))
    else:
        watch.connect(Address(*json.loads(os.read(read_end[0], 256))))
    while rank == 0 and len(watch._connections) < 2:
        time.sleep(0.01)
    watch.begin()
    script(watch)


def stuck(watch):
    time.sleep(60)


def finish(watch):
    watch.done()
    time.sleep(1.5)


def fail_and_stay(watch):
    watch.failed(ValueError("caught by the user"))
    time.sleep(1.5)


def begin_again(watch):
    watch.done()
    try:
        watch.begin()
    except RankDiedError as error:
        print(f"begin: {error}", flush=True)
    else:
        print(f"begin: {watch.death(wait_s=25)}", flush=True)


def finish_and_leave(watch):
    """The first rank leaves when others are done, as they are in a run of theirs."""
    watch.done()
    while not all(peer.completed for peer in watch._peers.values()):
        time.sleep(0.01)


def watching():
    scripts = {
        "a rank that waits elsewhere is ended": [stuck, stuck, lambda watch: os._exit(5)],
        "a rank that failed and goes on": [stuck, stuck, fail_and_stay],
        "ends that are no deaths": [finish, finish_and_leave, finish],
        "the hub may leave first": [finish_and_leave, finish, finish],
        "a rank that has left is missed later": [begin_again, begin_again, finish_and_leave],
    }
    for name, parts in scripts.items():  # one beside the other: most of it is waiting
        with output_to(FOLDER / f"{name}.txt"):
            pipe = os.pipe()
            scripts[name] = [fork(watched, rank, pipe, part) for rank, part in enumerate(parts)]
    for name, ranks in scripts.items():
        codes = wait_for(ranks, 30)
        print(f"== {name}", (FOLDER / f"{name}.txt").read_text(), codes, sep="\n", flush=True)


@contextlib.contextmanager
def output_to(path):
    """What this process and its forks write goes to a file."""
    ours, file = [os.dup(1), os.dup(2)], os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    try:
        yield
    finally:
        for stream, own in enumerate(ours, start=1):
            os.dup2(own, stream)
            os.close(own)


# ---- other ways to start ----


def spawn():
    module = PlainModule()
    trainer = make_trainer(2, "spawn")
    trainer.fit(module, *loaders())
    seen = {"loss": float(trainer.callback_metrics["val_loss"]), "meta": [p.is_meta for p in module.parameters()]}
    seen["whole"] = trainer.strategy.gather_module() is module
    alone = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    seen["validated"] = alone.validate(module, loaders()[1], verbose=False)  # here, as each spawned process imports all
    (FOLDER / "spawn.json").write_text(json.dumps(seen))


class Early(Module):
    """Notes who it is before processes are connected."""

    def __init__(self, early):
        super().__init__()
        self.early = early

    def configure_callbacks(self):
        self.early.append([self.global_rank, self.trainer.is_global_zero, self.trainer.world_size])
        return []


def clones():
    """Several runs, as scripts have them; the later ones start no more processes. In the last a child is killed."""
    print("before the fit", end=" ")  # is in a buffer then
    losses, parts, early = [], loaders(), []
    for _ in range(2):
        L.seed_everything(3, verbose=False)
        module = Early(early)
        trainer = make_trainer(2, "clone")
        early.append([trainer.global_rank, trainer.is_global_zero, trainer.world_size])
        trainer.fit(module, parts[0])  # without validation, of which the first rank warns before all are connected
        losses.append(module.history["train"])
    seen = {
        "losses": losses,
        "validated": trainer.validate(module, parts[1], verbose=False),
        "ranks": [trainer.global_rank, trainer.local_rank, trainer.world_size],
        "early": early,
        "processes": [os.getppid(), os.getpid()],
    }
    (FOLDER / f"{sys.argv[1]}_{trainer.global_rank}.json").write_text(json.dumps(seen))
    make_trainer(2, "clone").fit(Module(1, lambda: os.kill(os.getpid(), signal.SIGKILL)), parts[0])


def clones_of_threads():
    thread = threading.Thread(target=time.sleep, args=(600,), daemon=True)
    thread.start()
    clones()


def node():
    L.seed_everything(3, verbose=False)
    module = Module()
    trainer = make_trainer(1, num_nodes=2)
    train, val = loaders()
    trainer.fit(module, train, val)
    seen = {
        "losses": module.history["train"],
        "validate": trainer.validate(module, val, verbose=False),
        "test": trainer.test(module, val, verbose=False),
        "predict": torch.cat(trainer.predict(module, val)).tolist(),
        "ranks": [trainer.global_rank, trainer.node_rank, trainer.world_size],
    }
    (FOLDER / f"node_{trainer.global_rank}.json").write_text(json.dumps(seen))
    make_trainer(1, num_nodes=2).fit(Module(1, lambda: os._exit(3)), train, val)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "forks":
        slurm(sys.argv[3])
        deaths()
        watching()
        spawn()
    else:
        globals()[sys.argv[1]]()
