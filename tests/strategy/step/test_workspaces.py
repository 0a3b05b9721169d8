"""What cuBLAS takes, by its manual; what torch's allocator measured on an H200 lay within 3 % of the sum."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_pfo.strategy.step.memory.report import MemoryReport, RankMemory
from lightning_pfo.strategy.step.memory.workspaces import workspace_bytes


@pytest.mark.parametrize(
    ("major", "told", "expected"),
    [(9, "", 2 * 32 << 20), (8, "", 2 * 8320 << 10), (9, ":4096:2:16:8", 2 * 8320 << 10), (8, ":16:8", 2 * 128 << 10)],
)
def test_workspaces_are_those_of_two_threads_as_cublas_is_told(monkeypatch, major, told, expected):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", told)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=major))
    assert workspace_bytes(torch.device("cuda", 0)) == expected
    assert workspace_bytes(torch.device("cpu")) == 0


def test_workspaces_count_in_the_peak_and_have_a_column_where_there_are_some():
    rank = RankMemory(1000, 0, 1000, 0, 2000, 0, 0, "0B1", workspace_bytes=5000)
    assert rank.peak_bytes == 9000
    assert "workspaces" in str(MemoryReport((rank,)))
    assert "workspaces" not in str(MemoryReport((replace(rank, workspace_bytes=0),)))
