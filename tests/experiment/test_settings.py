"""What an experiment decides before it trains."""

import dataclasses
import math
import re

import pytest
import torch

from lightning_pfo.core.errors import ConfigurationError, PfoError
from lightning_pfo.device import GpuConfig
from lightning_pfo.experiment.accelerator import accelerator_of, devices_of_ranks, few_gpus, gpu_for
from lightning_pfo.experiment.checks import check_experiment, check_settings
from lightning_pfo.experiment.config import ExperimentConfig, PlanConfig, ScheduleConfig, TrainerConfig
from lightning_pfo.experiment.training import check_trainer_options
from lightning_pfo.listeners.profiling_run import ScanSettings
from tests.example_scripts import load_example

TEXT = load_example("gpt").data.TextConfig(max_bytes=200_000)


def config(gpu="auto", num_microbatches=8, **trainer):
    return ExperimentConfig(
        gpu=GpuConfig(kind=gpu),
        schedule=ScheduleConfig(num_microbatches=num_microbatches),
        trainer=TrainerConfig(**trainer),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_iterations_per_clock": 2}, "max_iterations_per_clock is at least 3; got 2"),
        ({"target_error": math.inf}, "above 0, such as 0.02 for 2 %; got inf"),
        ({"patience": 0}, "patience is at least 1; got 0"),
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
        ({"window_steps": 3, "warmup_steps": 3}, "got 3 of 3 steps. Use trainer.warmup_steps=1 trainer.window_steps=3"),
        ({"warmup_steps": 0}, "warmup_steps is at least 1"),
        ({"steps": 11, "window_steps": 4}, "whole windows .*; got 11 and 4. Use trainer.steps=12"),
        ({"steps": 0}, "got 0 and 2. Use trainer.steps=2"),
        ({"devices": 0}, "trainer.devices is at least 1; got 0"),
        ({"devices": 4, "num_microbatches": 3}, "num_microbatches=3 for 4 stages. Use num_microbatches=4"),
        ({"devices": 4, "num_nodes": 4}, "num_microbatches=8 for 16 stages"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        check_settings(config(**settings))


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        ("", {"seed": -1}, "seed is between 0 and 4294967295; got -1"),
        ("gpu", {"straggler_index": 4}, "straggler_index is between -1 and 3; got 4"),
        ("schedule", {"partition": "unifrom"}, "got 'unifrom'. Try partition='uniform'"),
        ("trainer", {"val_batches": -1}, "val_batches is at least 0; got -1"),
        ("profiler", {"patience": 0}, "patience is at least 1; got 0"),
        ("plan", {"select": "cheap"}, "Cannot select a plan by 'cheap'"),
        ("plan", {"num_plans": 1}, "num_plans must be at least 2"),
        ("plan", {"change_cost_j": math.nan}, "must be finite and at least 0; got 0.0, 0.0 and nan"),
        ("plan", {"p2p_blocking_power_w": [80, 81]}, "one number or one per stage; got 2 for 4 stages"),
        ("plan", {"p2p_blocking_power_w": {1410: -3}}, "at least 0.*; got"),
    ],
)
def test_every_section_is_checked(section, settings, message):
    changed = config()
    for key, value in settings.items():
        setattr(getattr(changed, section) if section else changed, key, value)
    with pytest.raises(PfoError, match=message):
        check_settings(changed)


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (
            "schedule",
            {"partition": "custom:0,1,2,3,5"},
            "0 to 12 .* got '0,1,2,3,5'.*'custom:0,3,6,9,12'",
        ),
        ("schedule", {"partition": "type:Blokc"}, "'Blokc' matches 0 of the layers, whose classes are .*'Block'"),
        ("trainer", {"precision": "31"}, "Trainer refuses the settings of trainer: Precision '31' is invalid"),
        ("trainer", {"options": {"gradient_clip_val": "x"}}, "refuses the settings .* should be an int or a float"),
        ("trainer", {"options": {"devices": 2}}, "trainer.options.devices follows trainer.devices"),
        ("", {"callbacks": {"stop": {"monitor": "x"}}}, "callbacks.stop is .*Use \\+callbacks.stop._target_="),
        ("", {"logger": {"x": {"_target_": "no_such.Logger"}}}, "logger.x._target_ cannot be imported"),
        ("profiler", {"min_clock_mhz": 5000}, "from 5000 MHz .* supports 210 to 1410 MHz.*Use min_clock_mhz=210"),
    ],
)
def test_model_data_trainer_and_gpu_are_checked_too(section, settings, message):
    gpt = load_example("gpt")
    changed = config("emulated")
    for key, value in settings.items():
        setattr(getattr(changed, section) if section else changed, key, value)
    with pytest.raises(PfoError, match=message):
        check_experiment(changed, lambda: gpt.model.Gpt(gpt.model.GptConfig()), lambda: gpt.data.StdlibText(TEXT))


def test_more_stages_than_layers_are_refused_before_processes_start():
    gpt = load_example("gpt")
    many = config("emulated", num_microbatches=64, devices=64)
    with pytest.raises(PfoError, match=r"has 34 layers for 64 stages\. Use 34 or fewer \(devices, times"):
        check_experiment(many, lambda: gpt.model.Gpt(gpt.model.GptConfig()), lambda: gpt.data.StdlibText(TEXT))


@pytest.mark.parametrize(
    ("example", "section", "settings", "message"),
    [
        (
            "gpt",
            "model",
            {"width": 63},
            "a multiple of model.num_heads; got 63 and 4. Use model.width=60",
        ),
        ("gpt", "model", {"num_heads": 0}, "model.num_heads is at least 1; got 0"),
        ("gpt", "model", {"learning_rate": math.nan}, "model.learning_rate is above 0; got nan"),
        ("gpt", "data", {"max_bytes": 0}, "data.max_bytes is at least 1; got 0"),
        ("gpt", "data", {"val_fraction": 2}, "data.val_fraction is between 0 and 1; got 2"),
        ("resnet", "model", {"base_width": 0}, "model.base_width is at least 1; got 0"),
        ("resnet", "data", {"batch_size": 0}, "data.batch_size is at least 1; got 0"),
    ],
)
def test_models_and_data_know_their_ranges(example, section, settings, message):
    settings_of = {"gptmodel": "GptConfig", "gptdata": "TextConfig", "resnetmodel": "ResNetConfig"}
    module = getattr(load_example(example), section)
    with pytest.raises(PfoError, match=message):
        getattr(module, settings_of.get(example + section, "DigitsConfig"))(**settings)


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


@pytest.mark.parametrize(
    ("settings", "num_gpus", "said"),
    [
        ({"devices": 4}, 1, "4 stages .* this machine has 1: .* on the CPU, and .* emulated .* Use trainer.devices=1"),
        ({"devices": 4, "gpu": "nvml"}, 2, "has 2: the model trains on the CPU. Use trainer.devices=2"),
        ({"devices": 4}, 4, "^$"),
        ({"devices": 4}, 0, "^$"),  # NVML says that there is none
        ({"devices": 4, "accelerator": "cpu"}, 1, "^$"),  # as was asked for
        ({"devices": 4}, 1, "or trainer.share_gpus=true to try the stages there"),
        ({"devices": 4, "share_gpus": True}, 1, "^4 stages share 1 GPU .*gloo.* No clock is set; .* emulated NVIDIA"),
    ],
)
def test_fewer_gpus_than_stages_are_said_in_one_line(settings, num_gpus, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    line = few_gpus(config(**settings))
    assert re.search(said, line)
    assert "\n" not in line


def test_a_run_that_optimises_itself_is_given_no_profile_and_no_top_clocks():
    perseus = PlanConfig(auto=True, policy="perseus", select="own")
    for changes in ({"profile": "p.csv"}, {"plan": PlanConfig(auto=True, select="top_clocks")}, {"plan": perseus}):
        wrong = dataclasses.replace(config(), **{"plan": PlanConfig(auto=True), **changes})
        with pytest.raises(ConfigurationError, match=r"\(plan=auto\) measures and plans .*; got (profile|plan)"):
            check_settings(wrong)
    check_settings(dataclasses.replace(config(), plan=PlanConfig(auto=True, select="1.02x")))


def test_an_earlier_profile_is_of_as_many_stages(tmp_path):
    again = config(devices=2)
    again.profile = str(tmp_path / "profile.csv")
    with pytest.raises(PfoError, match="There is no profile at"):
        check_settings(again)
    rows = [f"{stage},{kind},1410,1,1" for stage in range(3) for kind in ("forward", "backward")]
    (tmp_path / "profile.csv").write_text("\n".join(["stage,instruction,frequency,time,energy", *rows]))
    with pytest.raises(
        ConfigurationError, match=r"has 3 stages, this one 2. Use trainer.devices=3, or leave profile out"
    ):
        check_settings(again)
    again.trainer.devices = 3
    check_settings(again)


def test_ranks_that_share_a_gpu_talk_by_gloo_and_set_no_clocks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    shared = config(devices=4, share_gpus=True)
    assert accelerator_of(shared) == "gpu"
    assert gpu_for(shared).kind == "emulated"
    cuda = [torch.device("cuda", index) for index in (0, 1, 0, 1)]
    assert devices_of_ranks(shared) == {"parallel_devices": cuda, "process_group_backend": "gloo"}
    assert devices_of_ranks(config(devices=2)) == {}
    with pytest.raises(ConfigurationError, match=r"share a GPU .* got gpu.kind=nvml. Use gpu=emulated_a100"):
        check_settings(config(gpu="nvml", devices=4, share_gpus=True))
