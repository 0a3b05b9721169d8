"""Groups are made once, with the timeout that was asked for, and destroyed together when nobody uses them."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_pfo.strategy.parallel.groups import Wanted
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


def test_groups_are_made_once_and_go_with_their_users():
    run_ranks(check, 4)
