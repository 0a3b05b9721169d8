"""`release` undoes what a pipeline has changed in the model, the scaler and the accelerator."""

import json
from pathlib import Path

import pytest

from tests.launch import run_script


def test_release_gives_all_back(tmp_path):
    run_script(Path(__file__).parent / "scripts" / "giving_back.py", tmp_path)
    seen = json.loads((tmp_path / "results.json").read_text())
    methods = [
        "backward",
        "clip_grad_norm_",
        "free_memory",
        "gather",
        "gather_for_metrics",
        "get_state_dict",
        "hooks",
        "load_state",
        "prepare_data_loader",
        "prepare_optimizer",
        "prepare_scheduler",
        "reduce",
        "save_model",
        "save_state",
        "scheduler",
        "split_between_processes",
        "type",
        "unwrap_model",
        "wait_for_everyone",
    ]
    assert seen["training"] == [
        *(f"accelerator.{name}" for name in methods),
        "layer.forward",
        "scaler._unscale_grads_",
        "load_state_dict",
        "state_dict",
    ]
    assert seen["after"] == []
    assert seen["sampler"] == [[1, 0, False], [2, 1, True]]
    assert seen["same"] == pytest.approx(seen["loss"])
