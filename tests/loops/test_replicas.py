"""Data-parallel replicas of a pipeline in an Accelerate loop train like DDP."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script


def test_two_replicas_of_two_stages_train_like_ddp_of_two(tmp_path):
    run_script(Path(__file__).parent / "scripts" / "replicas.py", tmp_path)
    ddp = [json.loads((tmp_path / f"ddp_{rank}.json").read_text()) for rank in range(2)]
    pipeline = [json.loads((tmp_path / f"pipeline_{rank}.json").read_text()) for rank in range(4)]
    assert len(ddp[0]["loss"]) == 2 * 7  # with gradients averaged, then with weights averaged by LocalSGD
    assert len(ddp[0]["norm"]) == 4
    assert len(ddp[0]["predicted"]) == 3 * len(ddp[0]["repeated"]) == 3 * 37
    assert ddp[0]["loss"] != ddp[1]["loss"]  # they read different batches
    for rank, seen in enumerate(pipeline):
        for key in ("loss", "norm", "predicted", "repeated"):
            assert seen[key] == pytest.approx(ddp[rank // 2][key], abs=2e-5), key
    for name, weights in ddp[0]["weights"].items():
        assert pipeline[0]["weights"][name] == pytest.approx(weights, abs=2e-5), name
    assert [seen["weights"] for seen in pipeline[1:]] == [{}] * 3
