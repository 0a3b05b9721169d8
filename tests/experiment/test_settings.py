"""What an experiment decides before it trains."""

import pytest
import torch

from lightning_pfo.callbacks.profiling_run import ScanSettings
from lightning_pfo.config import ExperimentConfig, ScheduleConfig, TrainerConfig
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment.run import check_settings, gpu_for
from lightning_pfo.experiment.training import accelerator_of, check_trainer_options


def config(gpu="auto", num_microbatches=8, **trainer):
    return ExperimentConfig(
        gpu=GpuConfig(kind=gpu),
        schedule=ScheduleConfig(num_microbatches=num_microbatches),
        trainer=TrainerConfig(**trainer),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_iterations_per_clock": 2}, "max_iterations_per_clock must be at least 3; got 2"),
        ({"target_error": 0}, "above 0, such as 0.02 for 2 %; got 0"),
        ({"patience": 0}, "patience must be at least 1; got 0"),
    ],
)
def test_impossible_scans_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ScanSettings(**settings)


def test_defaults_are_fine():
    check_settings(config())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 3, "warmup_steps": 3}, "got 3 of 3 steps. Use trainer.warmup_steps=3 trainer.steps=16"),
        ({"warmup_steps": 0}, "warmup_steps must be at least 1"),
        ({"devices": 0}, "must be at least 1; got 0 and 1"),
        ({"devices": 4, "num_microbatches": 3}, "num_microbatches=3 for 4 stages. Use num_microbatches=4"),
        ({"devices": 4, "num_nodes": 4}, "num_microbatches=8 for 16 stages"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        check_settings(config(**settings))


@pytest.mark.parametrize(
    ("num_gpus", "asked", "resolved"), [(0, "auto", "cpu"), (3, "auto", "cpu"), (4, "auto", "gpu"), (4, "cpu", "cpu")]
)
def test_auto_takes_gpus_where_there_are_enough(monkeypatch, num_gpus, asked, resolved):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert accelerator_of(config(devices=4, accelerator=asked)) == resolved


@pytest.mark.parametrize(
    ("accelerator", "gpu", "kind"),
    [
        ("cpu", "auto", "emulated"),
        ("gpu", "auto", "auto"),
        ("cpu", "nvml", "nvml"),
        ("gpu", "emulated", "emulated"),
    ],
)
def test_a_gpu_that_stands_idle_is_not_measured(accelerator, gpu, kind):
    assert gpu_for(config(gpu=gpu, accelerator=accelerator)).kind == kind


def test_unknown_trainer_options_are_refused():
    check_trainer_options({"gradient_clip_val": 1.0})
    with pytest.raises(ConfigurationError, match=r"got 'gradient_clip'. Did you mean gradient_clip_\w+\?"):
        check_trainer_options({"gradient_clip": 1.0})
