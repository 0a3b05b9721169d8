"""Replicas go on with the first one's buffers, as under DDP."""

import json
from pathlib import Path

import pytest
import torch

from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.comparing import check
from tests.launch import run_script


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replica_buffers")
    run_script(Path(__file__).parents[1] / "scripts" / "replica_buffers.py", folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("kind", ["False", "zero3"])
def test_buffers_that_training_changes_are_those_of_ddp(seen, kind, rank):
    if kind != "False" and torch.__version__ < OLDEST_FSDP["cpu"]:
        pytest.skip("this torch keeps replicas whole")
    expected, found = seen[f"ddp_{rank // 2}"], seen[f"{kind}_{rank}"]
    check(found["losses"], expected["losses"], "losses")
    check(found["evaluated"], expected["evaluated"], "evaluated")
    assert len(found["buffers"]) >= 3
    for key, value in found["buffers"].items():
        assert value == pytest.approx(seen["ddp_0"]["buffers"][key], rel=1e-5), key
