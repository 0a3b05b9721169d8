"""What users of Hydra are used to: folders of their own, sweeps, flags, present folders, log files."""

import contextlib
import json
import os
import signal

import pytest
import yaml

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.experiment.command_line.instances import check_targets, make_callbacks, make_loggers
from tests.launch import kill_session, run_script, start_script
from tests.waiting import wait_until

SCRIPT = """
import dataclasses, json, logging, os
from pathlib import Path
from lightning_pfo.config import ExperimentConfig
from lightning_pfo.hydra_app import hydra_main

@hydra_main(NAME, ExperimentConfigPATH)
def main(config):
    logging.getLogger("a.module").info("what was done")
    folder = Path(config.output_dir)
    (folder / "seen.json").write_text(json.dumps(dataclasses.asdict(config) | {"cwd": os.getcwd()}))

main()
"""
LONG = """
import os, signal, time
from pathlib import Path
from lightning_pfo.config import ExperimentConfig
from lightning_pfo.hydra_app import hydra_main

@hydra_main("gpt", ExperimentConfig)
def main(config):
    heard = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda signum, _: heard.append(signum))
    folder = Path(config.output_dir)
    (folder / "begun.part").write_text(str(os.getpid()))
    (folder / "begun.part").rename(folder / "begun")
    while not heard:
        time.sleep(0.01)
    time.sleep(0.5)
    (folder / "heard").write_text(str(len(heard)))

main()
"""
PLAIN = """
import hydra
from omegaconf import OmegaConf

@hydra.main(config_path="conf", config_name="plain", version_base="1.3")
def main(config):
    print(OmegaConf.to_yaml(config))

main()
"""
FILES = {
    "script.py": SCRIPT.replace("NAME", '"gpt"').replace("PATH", ""),
    "own.py": SCRIPT.replace("NAME", '"own"').replace("PATH", ', config_path="conf"'),
    "plain.py": PLAIN,
    "long.py": LONG,
    "conf/own.yaml": "defaults: [own_schema, experiment, model: small, data: digits, _self_, override gpu: mine]\n"
    "name: own\n",
    "conf/plain.yaml": "defaults: [gpu: mine, _self_]\nhydra: {searchpath: ['pkg://lightning_pfo.conf']}\n",
    "conf/gpu/mine.yaml": "defaults: [emulated_a40]\nmodel: My GPU\n",
    "conf/model/small.yaml": "layers: 3\n",
    "conf/plan/1.5x.yaml": "select: 1.05x\n",
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))

    def run_with(script, *arguments, **options):
        return run_script(tmp_path / script, *arguments, **options)

    return run_with


def seen(folder):
    return json.loads((folder / "seen.json").read_text())


def test_a_sweep_over_files_and_selections_of_plans_keeps_flags_and_settings_of_hydra(run, tmp_path):
    run(
        *("script.py", "--config-dir", "conf", "--multirun", "gpu=mine", "plan=slowdown_2_percent,1.1x"),
        *("hydra.job.chdir=true", "output_dir=here"),
    )
    jobs = [seen(tmp_path / "here" / name) for name in ("0", "1")]
    assert [job["plan"]["select"] for job in jobs] == ["1.02x", "1.1x"]
    assert [job["gpu"]["model"] for job in jobs] == ["My GPU", "My GPU"]
    assert (
        [job["cwd"] for job in jobs]
        == [job["output_dir"] for job in jobs]
        == [str(tmp_path / "here" / n) for n in "01"]
    )


@pytest.mark.parametrize(
    ("send", "signum"),
    [
        (os.kill, signal.SIGINT),
        (os.killpg, signal.SIGINT),  # Ctrl-C in a terminal
        (os.kill, signal.SIGTERM),
        (os.kill, signal.SIGHUP),
    ],
)
def test_a_signal_to_a_sweep_ends_its_job_and_the_sweep(run, tmp_path, send, signum):
    sweep = start_script(tmp_path / "long.py", "--multirun", "seed=1,2", f"output_dir={tmp_path / 'here'}", fresh=True)
    job = tmp_path / "here" / "0"
    try:
        wait_until((job / "begun").exists)
        send(sweep.pid, signum)
        output, _ = sweep.communicate(timeout=60)
    finally:
        kill_session(sweep)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((job / "begun").read_text()), signal.SIGKILL)
    assert sweep.returncode == 128 + signum, output
    assert (job / "heard").read_text() == "1"  # and not as if Ctrl-C had been pressed twice
    assert not (tmp_path / "here" / "1").exists()


def test_a_primary_config_of_ones_own(run, tmp_path):
    run("own.py", "plan=1.5x")  # the file, not the selection
    found = seen(tmp_path / "outputs" / "own")
    assert (found["gpu"]["model"], found["model"], found["plan"]["select"]) == ("My GPU", {"layers": 3}, "1.05x")
    refused = run("own.py", "model=big", expect_success=False).stdout
    assert refused.startswith("Error: There is no model=big. Known: bert_tiny,")
    assert " small," in refused


def test_the_users_folder_is_searched_too(run, tmp_path):
    (folder := tmp_path / "home" / "lightning-pfo" / "conf" / "gpu").mkdir(parents=True)
    (folder / "here.yaml").write_text("defaults: [emulated_a40]\nmodel: Of this machine\n")
    run("script.py", "gpu=here")
    assert seen(tmp_path / "outputs" / "gpt")["gpu"]["model"] == "Of this machine"


def test_any_script_may_search_the_packaged_groups(run):
    assert yaml.safe_load(run("plain.py").stdout)["gpu"]["power_limit_w"] > 0  # of the packaged emulated_a40


@pytest.mark.parametrize(
    ("arguments", "cwd", "output_dir"),
    [
        ((), ".", "outputs/gpt"),
        (("hydra.job.chdir=true",), "outputs/gpt", "{}/outputs/gpt"),
        (("hydra.run.dir=there",), ".", "{}/there"),
        (("hydra.job.chdir=true", "output_dir=here"), "here", "{}/here"),
    ],
)
def test_results_and_present_folders(run, tmp_path, arguments, cwd, output_dir):
    order = "schedule.name=file:order.txt"
    run("script.py", *arguments, "profile=profile.csv", order, "callbacks=model_checkpoint")
    folder = tmp_path / output_dir.format(tmp_path)
    found = seen(folder)
    assert found["output_dir"] == output_dir.format(tmp_path)
    assert found["logger"]["csv"]["save_dir"] == found["output_dir"]
    assert found["cwd"] == str(tmp_path / cwd) if cwd != "." else str(tmp_path)
    # both are relative to where the command was given
    assert os.path.join(found["cwd"], found["profile"]) in (str(tmp_path / "profile.csv"),)  # noqa: PTH118
    name = found["schedule"]["name"].removeprefix("file:")
    assert os.path.join(found["cwd"], name) == str(tmp_path / "order.txt")  # noqa: PTH118
    (line,) = (folder / "script.log").read_text().splitlines()
    assert line.endswith(" INFO a.module: what was done")


def test_folders_that_are_not_there(run):
    for flags in (("--config-dir", "nowhere"), ("-cd=nowhere",)):
        missing = run("script.py", *flags, expect_success=False)
        flag = flags[0].partition("=")[0]
        error = f"Error: {flag} is a folder of groups; there is none at nowhere. Give {flag}=FOLDER.\n"
        assert (missing.returncode, missing.stdout) == (1, error)


CSV = {"_target_": "lightning.pytorch.loggers.CSVLogger", "save_dir": "x"}
STOPPING = {"_target_": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss"}


def test_callbacks_and_loggers_are_made_of_their_classes(tmp_path):
    (logger,) = make_loggers({"csv": CSV | {"save_dir": str(tmp_path)}})
    assert logger.save_dir == str(tmp_path)
    assert [one.monitor for one in make_callbacks({"stop": STOPPING, "none": None})] == ["val_loss"]
    assert [one.monitor for one in make_callbacks(STOPPING)] == ["val_loss"]
    assert make_loggers({}) == []


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"stop": {"monitor": "x"}}, r"callbacks.stop is \{.*\}. Use \+callbacks.stop._target_=PACKAGE.CLASS"),
        (
            {"stop": STOPPING | {"monitors": 1}},
            r"callbacks.stop cannot be made: .*unexpected keyword argument 'monitors'. Did you mean monitor\?",
        ),
        ({"csv": CSV}, "callbacks.csv._target_ is a class of .* Callbacks; got .*Such as lightning.*EarlyStopping"),
        (
            {"stop": {"_target_": "lightning.nothing.X"}},
            "callbacks.stop._target_ cannot be imported: .*lightning.nothing",
        ),
        (
            {"stop": {"_target_": "lightning.pytorch.callbacks.EarlyStoping"}},
            r"imported: lightning.pytorch.callbacks.EarlyStoping \(.*EarlyStoping'.*\). Did you mean EarlyStopping\?",
        ),
    ],
)
def test_what_is_no_callback_is_refused(section, message):
    with pytest.raises(ConfigurationError, match=message):
        make_callbacks(section)


def test_targets_are_looked_for_without_making_anything():
    check_targets("logger", {"csv": CSV})
    with pytest.raises(ConfigurationError, match=r"logger.wandb._target_ cannot be imported: .*no_such_package"):
        check_targets("logger", {"wandb": {"_target_": "no_such_package.WandbLogger"}})
