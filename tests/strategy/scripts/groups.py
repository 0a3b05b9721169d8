"""Makes and destroys groups of processes; usage: groups.py FUNCTION NUM_RANKS."""

import gc
import math
import sys
from datetime import timedelta

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.groups import Wanted, spread
from lightning_pfo.strategy.parallel.mesh import make_mesh
from tests.ranks import run_ranks

TIMEOUT = timedelta(seconds=77)


def all_groups():
    return list(distributed_c10d._world.pg_map)


def timeout_of(group):
    return group._get_backend(torch.device("cpu")).options._timeout


def check():
    before = all_groups()
    mesh = make_mesh("cpu", 2, 1, "dp_pp", TIMEOUT)
    made = [group for group in all_groups() if group not in before]
    assert len(made) == 3  # its pipeline, its replicas, itself
    assert {timeout_of(group) for group in made} == {TIMEOUT}
    assert dist.get_process_group_ranks(mesh.pipeline_group) == [mesh.replica * 2, mesh.replica * 2 + 1]
    assert dist.get_process_group_ranks(mesh.replica_group) == [mesh.rank, mesh.rank + 2]
    assert mesh.groups.hosts(mesh.pipeline_group) is mesh.pipeline_group

    again = make_mesh("cpu", 2, 1, "dp_pp", TIMEOUT)
    assert again.pipeline_group is mesh.pipeline_group
    rank = dist.get_rank()
    ring = [Wanted(tuple(sorted((one, (one + 1) % 4))), use="ring") for one in range(4)]
    of_ring = again.groups.together([wanted for wanted in ring if rank in wanted.ranks])
    assert all(rank in dist.get_process_group_ranks(group) for group in of_ring)

    if rank > 0:  # rank 0 has not collected its garbage yet
        again = None
    mesh.groups.destroy_unused()
    assert len(all_groups()) == len(before) + 5
    again = None
    other = make_mesh("cpu", 1, 1, "dp_pp", TIMEOUT)
    other.groups.destroy_unused()
    assert len(all_groups()) == len(before) + 3
    mesh = None
    other.groups.destroy_unused()
    assert len(all_groups()) == len(before) + 1  # a process alone
    dist.barrier()


def check_uneven():
    """Some processes are in more groups than others when all make further ones."""
    rank = dist.get_rank()
    mesh = make_mesh("cpu", 1, 1, "dp_pp", timedelta(seconds=20))
    of_ends = mesh.groups.together([Wanted((0, 3))] if rank in (0, 3) else [])
    assert [dist.get_process_group_ranks(group) for group in of_ends] == ([[0, 3]] if rank in (0, 3) else [])
    for timeout_s in (21, 22, 23, 24):
        other = make_mesh("cpu", 2, 1, "dp_pp", timedelta(seconds=timeout_s))
        other.groups.destroy_unused()
        dist.barrier(other.pipeline_group)


def check_spread():
    rank = dist.get_rank()
    for size in range(1, 6):
        group = dist.new_group(list(range(5 - size, 5)))
        if rank < 5 - size:
            continue
        mine = torch.tensor([rank == 3, rank, -rank, math.nan if rank == 4 else 0.0])
        found = spread(mine, torch.maximum, group).tolist()
        assert found[:3] == [size > 1, 4, size - 5]
        assert math.isnan(found[3])
        assert mine[1] == rank
        if size == 2:  # a message of the pipeline's is under way
            sent = dist.isend(torch.tensor(rank), 7 - rank, group)
            assert spread(mine, torch.maximum, group)[1] == 4
            dist.recv(received := torch.tensor(0), 7 - rank, group)
            sent.wait()
            assert received == 7 - rank


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.model[3].weight = self.model[0].weight  # whose users have a group of their own
        self.timeouts = []

    def training_step(self, batch, batch_idx):
        loss = self.model(batch).square().mean()
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_):
        self.timeouts.append([timeout_of(group) for group in all_groups() if group is not dist.group.WORLD])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_again_and_again():
    gc.disable()  # where a process has many objects, Python looks for garbage rarely
    numbers = []
    for timeout_s in (77, 77, 78, 79):  # groups that are used again, and others
        options = {"data_parallel_size": 2, "check_loss": False, "timeout": timedelta(seconds=timeout_s)}
        strategy = PfoPipelineStrategy(num_microbatches=2, **options)
        trainer = L.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=4,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module := Regression(), DataLoader(torch.randn(8, 4), batch_size=4))
        assert len(module.timeouts[0]) >= 3, "no group of its own"
        for timeouts in module.timeouts:  # groups of the fit before are gone, or are those of this one
            assert set(timeouts) == {timedelta(seconds=timeout_s)}, timeouts
        numbers.append(len(all_groups()))
    assert numbers[1:] == numbers[:1] * 3, numbers


run_ranks(globals()[sys.argv[1]], int(sys.argv[2]))
