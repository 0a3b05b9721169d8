"""Small tensors that replicas reduce: those of a step at once."""

import pytest
import torch
import torch.distributed as dist

from lightning_pfo.strategy.parallel.reductions import reduce_in_place, reduced_together


@pytest.fixture
def calls(monkeypatch):
    """How many elements each collective call has; another process has the same tensors."""
    found = []

    def all_reduce(tensor, operation, group):
        found.append(tensor.numel())
        if operation is dist.ReduceOp.SUM:
            tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    return found


def test_what_is_reduced_alike_is_reduced_in_one_call(calls):
    tensors = [torch.tensor(3.0), torch.arange(4.0).reshape(2, 2), torch.tensor(5.0), torch.tensor(7)]
    ways = ["mean", "mean", "sum", "max"]
    with reduced_together():
        reduced = [reduce_in_place(tensor, None, how) for tensor, how in zip(tensors, ways, strict=True)]
        assert calls == []
    assert calls == [5, 1, 1]
    assert all(one is tensor for one, tensor in zip(reduced, tensors, strict=True))
    assert [tensor.tolist() for tensor in tensors] == [3.0, [[0.0, 1.0], [2.0, 3.0]], 10.0, 7]
    reduce_in_place(tensors[0], None, "sum")
    assert (calls[3:], tensors[0].item()) == ([1], 6.0)


def test_after_an_error_nothing_is_reduced(calls):
    with pytest.raises(ZeroDivisionError), reduced_together():
        assert reduce_in_place(torch.tensor(3.0), None, "mean") / (1 // 0)
    assert calls == []
    reduce_in_place(torch.tensor(3.0), None, "mean")
    assert calls == [1]
