"""What the strategy changes in the user's module, in Lightning and in Python is as it was when training has ended."""

import json
from pathlib import Path

from tests.launch import run_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "giving_back.py"


def test_all_is_given_back_after_each_run(tmp_path):
    run_script(SCRIPT, tmp_path)
    for run in json.loads((tmp_path / "results.json").read_text()):
        assert run["while training"] == [
            "connector.on_batch_end",
            "epoch._broadcast_sigterm_tensor",
            "epoch.on_advance_end",
            "finetuning.filter_on_optimizer",
            "fit.on_advance_end",
            "layer.forward",
            "metric.compute",
            "metrics._sync_dist",
            "metrics._wrap_compute",
            "plugin.backward",
            "plugin.clip_grad_by_norm",
            "plugin.clip_grad_by_value",
            "predict.on_run_end",
            "predict.run",
            "signals._sigterm_notifier_fn",
            "signals._slurm_sigusr_handler_fn",
            "validated.increment_completed",
            "validated.increment_ready",
            "validation._store_dataloader_outputs",
            "validation.run",
        ]
        assert run["after"] == []
        assert (run["filters while training"], run["filters after"]) == (3, True)
        assert (run["callbacks while training"], run["callbacks after"]) == (0, 0)
        assert run["example"] == [True, True]
