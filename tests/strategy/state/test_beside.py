"""Checkpoints that are written beside training hold what there was when they were begun, and none is lost by them."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.groups import Groups, Wanted
from lightning_pfo.strategy.state.sharded import is_sharded, load, save
from tests.ranks import run_ranks

PATIENCE_S = 60


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(4) for _ in range(2))


def check(path):
    groups, rank = Groups("cpu"), dist.get_rank()
    (beside,) = groups.together([Wanted((0, 1), "gloo", use="checkpoints")])
    may_write, write = threading.Event(), FileSystemWriter.write_data
    fails = [False]

    def write_later(self, *args):
        may_write.wait(PATIENCE_S)
        if fails[0]:
            raise OSError("no space left")
        return write(self, *args)

    def begin(value, epoch):
        weight = torch.full((4,), value)
        shard = {"state_dict": {f"weights.{rank}": weight}, "optimizer_states": [], "epoch": epoch}
        saving = save(shard, path, beside)
        weight.fill_(-1)  # training goes on
        together = torch.ones(1)
        dist.all_reduce(together)
        assert together.item() == 2
        assert not saving.done()
        return saving

    def read():
        checkpoint = load(path, Net(), [], weights_only=True)
        return checkpoint["epoch"], [weight.tolist() for weight in checkpoint["state_dict"].values()]

    FileSystemWriter.write_data = write_later
    try:
        saving = begin(1.0 + rank, 3)
        assert not path.exists()
        may_write.set()
        saving.result(PATIENCE_S)
        dist.barrier()
        assert is_sharded(path)
        first = 3, [[1.0] * 4, [2.0] * 4]
        assert read() == first

        may_write.clear()
        fails[0] = True
        saving = begin(8.0, 4)
        assert read() == first
        may_write.set()
        with pytest.raises(OSError, match="no space left"):
            saving.result(PATIENCE_S)
        dist.barrier()
        assert read() == first
        shard = {"state_dict": {f"weights.{rank}": torch.ones(4)}, "optimizer_states": [], "epoch": 5}
        with pytest.raises(OSError, match="no space left"):  # nor one that training waits for
            save(shard, path)
        dist.barrier()
        assert read() == first
        assert list(path.parent.iterdir()) == [path]  # pieces would take the space
    finally:
        FileSystemWriter.write_data = write


def test_a_checkpoint_beside_training_is_that_of_its_begin(tmp_path):
    run_ranks(check, 2, tmp_path / "last.ckpt")


def test_other_ways_to_save_are_refused():
    with pytest.raises(ConfigurationError, match="False, True or 'async'; got 'later'"):
        PfoPipelineStrategy(save_distributed_checkpoint="later")
