import inspect

import pytest

from lightning_pfo.strategy.watch.stuck import end_if_stuck
from tests.launch import run_script


@pytest.mark.parametrize(
    ("waiting", "breaking_off", "status"),
    [
        ("lock.acquire()", "pass", 143),  # as if waiting for another rank, where no handler can run
        ("lock.acquire() and os._exit(5)", "lock.release()", 5),  # what waits fails, and the process ends itself
        ("[time.sleep(0.01) or done.append(1) for _ in range(80)]", "os._exit(1)", 0),  # others come
        ("ended.set() or time.sleep(1)", "os._exit(1)", 0),  # the run is over
    ],
)
def test_who_is_asked_to_end_and_waits_for_others_ends(tmp_path, waiting, breaking_off, status):
    script = tmp_path / "script.py"
    script.write_text(STUCK.replace("WAITING", waiting).replace("BREAKING_OFF", breaking_off))
    ended = run_script(script, expect_success=False)
    assert ended.returncode == status, ended.stdout
    assert ("it is in <module>" in ended.stdout) == (status in (5, 143))


STUCK = """
import logging, os, signal, sys, threading, time
from lightning_pfo.strategy.watch.stuck import Waits, end_if_stuck, heard

logging.basicConfig()
lock, done, ended = threading.Lock(), [], threading.Event()
lock.acquire()


def break_off():
    BREAKING_OFF


def then():
    end_if_stuck(Waits(break_off, {__file__}, lambda: len(done)), ended, patience_s=0.3, grace_s=0.3)


before = signal.set_wakeup_fd(-1)
signal.signal(signal.SIGTERM, lambda *_: None)
with heard(signal.SIGTERM, then):
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)  # a child's signal is its own
        time.sleep(0.1)
        os._exit(0)
    os.waitpid(child, 0)
    parent = os.getpid()
    if not os.fork():  # as a loader's worker, which outlives the context
        while os.getppid() == parent:
            time.sleep(0.05)
        os._exit(0)
    assert not lock.acquire(timeout=0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    WAITING
    ended.set()
assert signal.set_wakeup_fd(-1) == -1
assert threading.active_count() == 1
"""


def test_who_is_asked_to_end_is_given_less_than_five_seconds():
    parameters = inspect.signature(end_if_stuck).parameters
    assert parameters["patience_s"].default + parameters["grace_s"].default < 5


def test_a_rank_that_hangs_in_a_collective_obeys_sigterm_and_says_where(tmp_path):
    (script := tmp_path / "script.py").write_text(HANGING)
    said = run_script(script, tmp_path).stdout
    assert "SIGTERM ends this process while it waits for others" in said
    assert "it is in spread, called in " in said
    assert "processes.py" in said


HANGING = """
import os, signal, sys, time
from pathlib import Path
import lightning as L
import torch
from torch import multiprocessing, nn
from torch.utils.data import DataLoader, TensorDataset
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.watch.rank_watch import RankDiedError
from tests.ranks import run_rank

FOLDER = Path(sys.argv[1])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 0:
            (FOLDER / "hangs").touch()
            while not (FOLDER / "goes on").exists():
                time.sleep(0.05)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train():
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=PfoPipelineStrategy(), max_epochs=1, **silent)
    try:
        trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    except RankDiedError as error:
        assert "rank 1" in str(error), error
        os._exit(7)


ranks = [
    multiprocessing.get_context("fork").Process(target=run_rank, args=(rank, 2, f"file://{FOLDER}/store", train, ()))
    for rank in (0, 1)
]
for rank in ranks:
    rank.start()
while not (FOLDER / "hangs").exists():
    time.sleep(0.05)
time.sleep(0.5)  # rank 1 comes to the place where they meet
for rank in ranks:
    os.kill(rank.pid, signal.SIGTERM)
ranks[1].join(40)  # in a collective it would wait for half an hour
assert ranks[1].exitcode in (1, 143), ranks[1].exitcode
(FOLDER / "goes on").touch()
ranks[0].join()
assert ranks[0].exitcode == 7, ranks[0].exitcode
"""
