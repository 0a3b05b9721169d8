"""The configuration: every file composes, every mistake is one helpful paragraph, Hydra's command line works."""

import ast
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.paths import conf_dir
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.experiment.command_line.arguments import understood
from lightning_pfo.experiment.command_line.compat import helps_of_any_kind
from lightning_pfo.experiment.command_line.explain import check_no_foreign_keys
from lightning_pfo.experiment.config import ExperimentConfig, TrainerConfig
from tests.example_scripts import ROOT, load_example
from tests.launch import run_script

EXAMPLE_OF = dict.fromkeys(("resnet_tiny", "wide_resnet", "wide_resnet50_2", "digits"), "resnet")
"""The others are for gpt, or for both."""
OPTIONS = [
    (path.parent.name, path.stem)
    for path in sorted(conf_dir().glob("*/*.yaml"))
    if path.parent.parent == conf_dir() and path.parent.name != "hydra"
]


@pytest.fixture(autouse=True)
def _clear_hydra():
    yield
    GlobalHydra.instance().clear()


def composed(example, *overrides):
    schema = load_example(example).train.Config
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = OmegaConf.to_object(compose(example, list(overrides)))
    assert type(config) is schema
    check_no_foreign_keys(config)
    return config


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_option_composes(group, option):
    config = composed(EXAMPLE_OF.get(option, "gpt"), f"{group}={option}")
    section = getattr(config, group)
    text = (conf_dir() / group / f"{option}.yaml").read_text().replace("${output_dir}", config.output_dir)
    loaded = yaml.safe_load(text.replace("${data.sequence_length}", str(getattr(config.data, "sequence_length", None))))
    for key in loaded.keys() - {"defaults"}:
        assert (section[key] if isinstance(section, dict) else getattr(section, key)) == loaded[key]


def behaviour(config):
    """What a GPU of index 1 does in two instructions of 0.1 s, the second after a change of clock."""
    gpu = EmulatedGpu(config, index=1, time_source=(clock := VirtualTime()))
    seen = {"start_mj": gpu.total_energy_mj()}
    for name, clock_mhz in (("first", 1410), ("second", 1005)):
        begin_s = clock.now_s()
        gpu.lock_graphics_clock(clock_mhz)
        gpu.begin_work()
        seen[f"{name}_clock_mhz"] = gpu.graphics_clock_mhz()
        gpu.finish_work(0.1, 0.0)
        seen[f"{name}_s"] = clock.now_s() - begin_s
    return seen | {"energy_mj": gpu.total_energy_mj()}


@pytest.mark.parametrize(
    ("overrides", "seen_in"),
    [
        (["gpu.noise=0.05"], "first_s"),
        (["gpu.counter_tick_s=0.1"], "energy_mj"),
        (["gpu.clock_latency_s=0.02"], "second_s"),
        (["gpu.power_limit_w=300"], "first_clock_mhz"),
        (["gpu.throttle_clock_mhz=900"], "second_clock_mhz"),
        (["gpu.straggler_index=1", "gpu.straggler_factor=1.5"], "first_s"),
    ],
)
def test_options_of_the_emulated_gpu_act_from_the_command_line(overrides, seen_in):
    plain, changed = (behaviour(composed("gpt", "gpu=emulated_a100", *more).gpu) for more in ([], overrides))
    assert changed[seen_in] != plain[seen_in]


def test_overrides_reach_the_dataclass():
    config = composed("gpt", "trainer.devices=2", "gpu.noise=0.1", "+trainer.options.gradient_clip_val=1")
    assert (config.trainer.devices, config.gpu.noise) == (2, 0.1)
    assert config.trainer.options == {"gradient_clip_val": 1}


def test_model_follows_the_sequence_length_of_the_data():
    assert composed("gpt", "data.sequence_length=16").model.sequence_length == 16


@pytest.mark.parametrize(
    "path",
    [
        "lightning_pfo/experiment/config.py",
        *(str(path) for path in (ROOT / "examples").glob("*/*.py") if path.name != "train.py"),
    ],
)
def test_every_field_is_documented(path):
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, after in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                    assert documented, f"{node.name}.{field.target.id} lacks a docstring"


def test_foreign_keys_are_refused():
    config = ExperimentConfig(trainer=TrainerConfig())
    config.trainer.devcies = 2
    with pytest.raises(ConfigurationError, match=r"no key 'devcies' in trainer. Did you mean devices\? Known: acc"):
        check_no_foreign_keys(config)


# The same main function as the examples have, without the libraries that they train with.
SCRIPT = """
import dataclasses, json, os, signal, time
from pathlib import Path
from lightning_pfo.config import ExperimentConfig
from lightning_pfo.core.errors import PlanError
from lightning_pfo.hydra_app import hydra_main

@hydra_main("gpt", ExperimentConfig)
def main(config):
    if config.seed == 13:
        raise PlanError("A plan is needed.")
    if config.seed == 14:
        raise ZeroDivisionError("a bug")
    if config.seed == 15:  # as Lightning does
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            exit(1)
    if config.seed == 16:  # a clone of this process, as launchers make them, finds the same, but later
        first = os.getpid()
        if os.fork() == 0:
            os.environ["LOCAL_RANK"] = "1"
            while os.getppid() == first:
                time.sleep(0.01)
        raise PlanError("A plan is needed, say all.")
    assert type(config) is ExperimentConfig and os.environ.get("HYDRA_FULL_ERROR") is None
    (Path(config.output_dir) / "seen.json").write_text(json.dumps(dataclasses.asdict(config)))

main()
"""


@pytest.fixture
def run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def run_with(*arguments, environment=None):
        return run_script(script, *arguments, expect_success=False, **(environment or {}))

    return run_with


def test_a_run_writes_into_its_output_dir_only(run, tmp_path):
    result = run("schedule.num_microbatches=6", f"output_dir={tmp_path / 'out'}")
    assert (result.returncode, result.stdout) == (0, "")
    seen = json.loads((tmp_path / "out" / "seen.json").read_text())
    assert seen["schedule"]["num_microbatches"] == 6
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "out"}
    recorded = yaml.safe_load((tmp_path / "out" / "config" / "overrides.yaml").read_text())
    assert recorded[0] == "schedule.num_microbatches=6"


def test_multirun_runs_each_job_on_its_own(run, tmp_path):
    result = run("--multirun", "plan=no_slowdown,least_energy", "seed=3", f"output_dir={tmp_path / 'out'}")
    assert result.returncode == 0, result.stdout
    jobs = [json.loads((tmp_path / "out" / str(job) / "seen.json").read_text()) for job in range(2)]
    assert [job["plan"]["select"] for job in jobs] == ["no_slowdown", "least_energy"]
    assert [job["seed"] for job in jobs] == [3, 3]


def test_a_failing_job_of_a_sweep_fails_the_sweep(run, tmp_path):
    result = run("--multirun", "seed=13,1", f"output_dir={tmp_path / 'out'}")
    assert (result.returncode, result.stdout) == (1, "Job 0 of the sweep: seed=13\nError: A plan is needed.\n")


def test_cfg_job_shows_the_configuration(run):
    result = run("--cfg", "job", "plan=least_energy")
    assert result.returncode == 0
    assert yaml.safe_load(result.stdout)["plan"]["select"] == "least_energy"


@pytest.mark.parametrize(
    ("argument", "override"),
    [
        ("plan=1.02x", 'plan="1.02x"'),
        ("plan=T'=2.9s", 'plan="T\'=2.9s"'),
        ("plan=fastest", 'plan="fastest"'),
        ("plan=least_energy", "plan=least_energy"),  # a file
        ("plan=no_slowdown,1.02x,'350W'", 'plan=no_slowdown,"1.02x","350W"'),  # a sweep
        ("plan=choice(no_slowdown,least_energy)", "plan=choice(no_slowdown,least_energy)"),
        ("plan=least_enrgy", "plan=least_enrgy"),  # for Hydra to refuse
        ("plan=1.02", 'plan="1.02"'),  # for `check_settings` to refuse, which says what a selection looks like
        ("gpu=40", 'gpu="40"'),
        ("schedule.partition=custom:0,2,6", 'schedule.partition="custom:0,2,6"'),
        ("plan.select=1.02x", "plan.select=1.02x"),
        ("seed=3", "seed=3"),
    ],
)
def test_a_plan_may_be_any_selection(argument, override):
    assert understood([argument], [conf_dir()]) == [override]


def test_selections_reach_the_configuration(run):
    result = run("--cfg", "job", "plan=T'=1.1x", "plan.switch_latency_s=0.01")
    assert result.returncode == 0
    plan = yaml.safe_load(result.stdout)["plan"]
    assert (plan["select"], plan["switch_latency_s"]) == ("T'=1.1x", 0.01)


def test_help_lists_groups_options_and_common_overrides(run):
    text = run("--help").stdout
    assert (
        "plan: auto, compare, envpipe_baseline, envpipe_envelope, envpipe_uniform, least_energy, no_slowdown, " in text
    )
    assert "gpu: auto, emulated_a100" in text
    assert "trainer.devices=2" in text
    assert "$" not in text.replace("${", "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.devcies=2", "There is no key 'devcies' in trainer. Did you mean devices? Known: accelerator,"),
        ("+trainer.devcies=2", "There is no key 'devcies' in trainer. Did you mean devices? Known: accelerator,"),
        ("gpu.nosie=0.1", "There is no key 'nosie' in gpu. Did you mean noise? Known: ambient_c, blocked_activity,"),
        ("modle=gpt_tiny", "There is no key 'modle' at the top level of the configuration. Did you mean model? Known:"),
        (
            "+extra=1",
            "There is no key 'extra' at the top level of the configuration. Known: callbacks, cluster, data, gpu,",
        ),
        (
            "plan=least_enrgy",
            "There is no plan=least_enrgy. Did you mean least_energy? Known: auto, compare, envpipe_ba",
        ),
        (
            "plan=cheap",
            "There is no plan=cheap. Known: auto, compare, envpipe_baseline, envpipe_envelope, envpipe_uniform, "
            "least_energy, no_slowdown, perseus, slowdown_2_percent, top_clocks, zeus_global, zeus_per_stage. "
            "Or select one by 3, 1.02x, 2.84s, 350W, T'=2.9s,",
        ),
        (
            "schedule=gpipe",
            "There is no schedule=gpipe. Known: 1f1b. Or name an order by schedule.name=NAME: 1f1b, dualpipev, "
            "envpipe, gpipe, interleaved_1f1b,",
        ),
        ("gpu=40", "There is no gpu=40. Known: auto, emulated_a100,"),
        ("gpu=emulated_a400", "There is no gpu=emulated_a400. Did you mean emulated_a40? Known: auto, emulated_a100,"),
        ("trainer.devices=two", "trainer.devices: Value 'two' of type 'str' could not be converted to Integer"),
        ("trainer.devices=???", "trainer.devices needs a value. Give it on the command line: trainer.devices=VALUE."),
        ("gpu.noise=2", "gpu.noise is between 0 and 0.3; got 2.0."),
        ("trainer.devices", "parsing override 'trainer.devices'"),
        ("seed=13", "A plan is needed."),
    ],
)
def test_a_mistake_is_one_paragraph(run, tmp_path, override, message):
    result = run(override, f"output_dir={tmp_path / 'out'}")
    assert result.returncode == 1
    assert result.stdout.startswith(f"Error: {message}")
    assert result.stdout.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_paragraph(run, tmp_path):
    (tmp_path / "file").touch()
    result = run(f"output_dir={tmp_path / 'file' / 'out'}")
    assert result.returncode == 1
    assert re.fullmatch(r"Error: The output folder cannot be made \(.*file.*\)\. Give another: .*\n", result.stdout)


def test_full_errors_on_request(run, tmp_path):
    result = run("seed=13", f"output_dir={tmp_path / 'out'}", environment={"HYDRA_FULL_ERROR": "1"})
    assert result.returncode != 0
    assert "Traceback" in result.stdout
    assert "PlanError: A plan is needed." in result.stdout


def test_a_mistake_is_said_once_however_late_a_clone_finds_it(run, tmp_path):
    result = run("seed=16", f"output_dir={tmp_path / 'out'}")
    assert (result.returncode, result.stdout) == (1, "Error: A plan is needed, say all.\n")


def test_ctrl_c_says_interrupted_once(run, tmp_path):
    result = run("seed=15", f"output_dir={tmp_path / 'out'}")
    assert (result.returncode, result.stdout) == (130, "Interrupted.\n")


@pytest.mark.parametrize(
    ("argument", "override"),
    [
        ("output_dir=007", 'output_dir="007"'),
        ("output_dir=my out #2", 'output_dir="my out #2"'),
        ("output_dir=~/out", 'output_dir="/home/me/out"'),
        ("output_dir='007'", "output_dir='007'"),
        ("output_dir=a,b", "output_dir=a,b"),
        ("output_dir=${name}/x", "output_dir=${name}/x"),
        ("seed=007", "seed=007"),
    ],
)
def test_the_folder_is_taken_as_it_stands(argument, override, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert understood([argument], []) == [override]


def test_results_are_in_the_folder_that_was_given(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("output_dir=007", "seed=3").returncode == 0
    assert json.loads((tmp_path / "007" / "seen.json").read_text())["output_dir"] == "007"


@pytest.mark.parametrize("given", ["", "''"])
def test_an_empty_folder_is_refused(run, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(f"output_dir={given}")
    error = "Error: output_dir is a folder; got ''. Give output_dir=PATH, or leave it out.\n"
    assert (result.returncode, result.stdout) == (1, error)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


@pytest.mark.parametrize("example", ["gpt", "resnet"])
def test_ctrl_c_while_torch_is_imported_is_one_line(example, tmp_path):
    (tmp_path / "torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    script = ROOT / "examples" / example / "train.py"
    result = run_script(script, expect_success=False, fresh=True, **environment)
    assert (result.returncode, result.stdout) == (-signal.SIGINT, "Interrupted.\n")


def test_a_bug_keeps_its_traceback(run, tmp_path):
    result = run("seed=14", f"output_dir={tmp_path / 'out'}")
    assert result.returncode != 0
    assert 'raise ZeroDivisionError("a bug")' in result.stdout


def test_the_model_of_another_example_is_refused(monkeypatch):
    train = load_example("gpt").train
    monkeypatch.setattr(sys, "argv", ["train.py", "model=resnet_tiny"])
    schemas = ConfigStore.instance().repo["model"]["schema"]
    monkeypatch.delitem(schemas, "resnet.yaml", raising=False)  # other tests have imported the other example
    with pytest.raises(SystemExit, match=r"In model/resnet_tiny.yaml: There is no key 'blocks_per_group' in model"):
        train.main()


def test_the_schema_imports_quickly():
    code = "import sys, lightning_pfo.experiment.command_line.hydra_main; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_the_helps_of_hydras_command_line_can_be_looked_into():
    """As Python 3.14 does; one of Hydra's is no text."""
    with helps_of_any_kind():
        helps = [action.help for action in get_args_parser()._actions]
    assert not all(isinstance(text, str) for text in helps)
    assert not any("%" in text for text in helps)
