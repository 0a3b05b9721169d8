"""The examples from end to end, in real processes on emulated GPUs, as small as they get."""

import contextlib
import csv
import json
import os
import signal
import statistics
from pathlib import Path

import pytest

from lightning_pfo.planner import load_frontier
from tests.device.fake_driver import fake_driver  # noqa: F401
from tests.example_scripts import ROOT
from tests.launch import kill_session, run_script, session_is_empty, start_script
from tests.waiting import wait_until

PROFILE = "\n".join(
    [
        "stage,instruction,frequency,time,energy,p2p_blocking_power_w",
        *(
            f"{stage},{kind},{clock},{clock_time * factor},{energy * factor},80"
            for stage in range(2)
            for kind, factor in (("forward", 1), ("backward", 2))
            for clock, clock_time, energy in ((1740, 0.03, 9.0), (1545, 0.033, 7.0), (1350, 0.037, 6.0))
        ),
    ]
)
"""Of other GPUs; what it predicts is not what is measured."""
SMALL = ("gpu=emulated_a40", "model.num_blocks=3", "data.batch_size=8")
QUICK = ("trainer=quick", "profiler=quick", "trainer.progress_bar=false")


def run_example(name, output_dir, *overrides, **options):
    script = ROOT / "examples" / name / "train.py"
    return run_script(script, *QUICK, f"output_dir={output_dir}", *overrides, **options)


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("no_permission", "Error: A frequency scan sets clocks, which rank 0 cannot: "),
        ("ignores", "Error: A plan is made of clocks that were really there when they were measured; "),
    ],
)
def test_without_clock_control_the_main_job_ends_and_says_so(tmp_path, fake_driver, scenario, error):  # noqa: F811
    needed = ("LD_LIBRARY_PATH", "LIGHTNING_PFO_RUNTIME_DIR")
    environment = {
        name: value
        for name, value in fake_driver.environment(scenario, num_gpus=1).items()
        if name in needed or name.startswith("FAKE_NVML_")
    }
    clocks = ("profiler.clock_step_mhz=600", "profiler.min_clock_mhz=800", "profiler.max_iterations_per_clock=3")
    settings = ("gpu=nvml", "trainer.devices=1", "trainer.accelerator=cpu", "model=gpt_tiny", *clocks)
    done = run_example("gpt", tmp_path / "run", *settings, expect_success=False, **environment)
    assert done.returncode == 1
    assert error in done.stdout
    assert "report.json" not in {path.name for path in (tmp_path / "run").iterdir()}
    assert ("profile.csv" in {path.name for path in (tmp_path / "run").iterdir()}) == (scenario == "ignores")
    assert fake_driver.locked_gpus() == {}


def test_gpt_profiles_plans_trains_and_reports(tmp_path):
    output = run_example("gpt", tmp_path, *SMALL, "plan=slowdown_2_percent").stdout
    for text in ("1/3 Profiling 2 stages x 8 microbatches", "3/3 Training 8 steps", "EMULATED", "Losses of 8 steps"):
        assert output.count(text) == 1, output  # said once, by rank 0

    report = json.loads((tmp_path / "report.json").read_text())
    assert "emulated" in report["device"]
    assert report["losses"]["identical"], report["losses"]
    assert len(report["losses"]["training"]) == report["losses"]["compared"] == 8
    assert report["losses"]["training"][-1] < report["losses"]["training"][0]
    for run in ("baseline", "plan"):
        assert len(report[run]["iteration_times_s"]) == 2  # two windows of two steps, one of them warm-up
        assert report[run]["iteration_time_s"] == statistics.median(report[run]["iteration_times_s"])
        assert report[run]["iteration_energy_j"] > 0
    training = report["training"]
    assert training["clocks"]["num_changes"] > 0
    assert training["val_loss"] > 0
    assert list(training["clocks_of_ranks"]) == ["rank 0", "rank 1"]
    assert training["clocks_of_ranks"]["rank 0"] == training["clocks"]
    assert report["clock_failures"] == {}

    frontier = load_frontier(tmp_path / "plans")
    assert (frontier.schedule.num_stages, frontier.schedule.num_microbatches) == (2, 8)
    predicted = report["predicted"]
    assert predicted["baseline"]["iteration_time_s"] == frontier.baseline.iteration_time_s
    assert predicted["plan"]["iteration_time_s"] <= 1.02 * predicted["baseline"]["iteration_time_s"] * (1 + 1e-9)
    assert report["lower_bound_saving_percent"] >= 100 * (
        1 - predicted["plan"]["iteration_energy_j"] / predicted["baseline"]["iteration_energy_j"]
    )
    assert report["settings"]["plan"]["select"] == "1.02x"

    with (tmp_path / "training" / "metrics.csv").open() as file:
        logged = [float(row["pfo/iteration_time_s"]) for row in csv.DictReader(file) if row["pfo/iteration_time_s"]]
    # of eight steps, the first counts work: top, plan, plan, top
    tops_s, plans_s = logged[0], logged[2]
    assert [tops_s, logged[-1]] == pytest.approx(report["baseline"]["iteration_times_s"], rel=1e-4)
    assert [plans_s, logged[4]] == pytest.approx(report["plan"]["iteration_times_s"], rel=1e-4)
    for picture in ("frontier", "timelines", "energy_valleys", "losses", "windows"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mistake", ["trainer.devices=0", "+trainer.options.gradient_clip=1.0", "model.num_heads=7"])
def test_a_command_that_is_refused_leaves_the_results_of_an_earlier_run_where_they_are(tmp_path, mistake):
    earlier = {name: f"{name} of before" for name in ("report.json", "profile.csv", "config/config.yaml", "train.log")}
    (tmp_path / "config").mkdir()
    for name, text in earlier.items():
        (tmp_path / name).write_text(text)
    refused = run_example("gpt", tmp_path, "gpu=emulated_a40", "trainer.devices=2", mistake, expect_success=False)
    assert refused.returncode == 1
    assert "earlier run" not in refused.stdout
    assert {name: (tmp_path / name).read_text() for name in earlier} == earlier
    assert not (tmp_path / "earlier").exists()


def test_an_earlier_profile_and_earlier_results(tmp_path):
    """In six rounds of windows, of three policies and the top clocks, with a logger and callbacks of one's own.

    The profile lies among the earlier results.
    """
    (tmp_path / "profile.csv").write_text(PROFILE)
    (tmp_path / "report.json").write_text("{}")
    ours = ("trainer.steps=12", "gpu.noise=0.02", "gpu.counter_tick_s=0.02", f"profile={tmp_path / 'profile.csv'}")
    users = ("callbacks=model_checkpoint", "+callbacks.rates._target_=lightning.pytorch.callbacks.LearningRateMonitor")
    small = ("model.num_blocks=1", "data.batch_size=4", "schedule.num_microbatches=2", "gpu=emulated_a40")
    output = run_example("gpt", tmp_path, *small, "plan.compare=[perseus,zeus_global]", *ours, *users).stdout
    assert f"The results of an earlier run were moved to {tmp_path / 'earlier' / '1'}." in output
    assert (tmp_path / "earlier" / "1" / "report.json").read_text() == "{}"
    assert (tmp_path / "profile.csv").read_text() == PROFILE
    assert "1/3 Reusing the profile" in output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"]["identical"] is None
    low, high = report["slowdown_interval_percent"]
    assert low < report["slowdown_percent"] < high
    assert len(report["plan"]["window_energies_j"]) == 6
    assert len(report["losses"]["training"]) == 4 * 12
    assert [*report["policies"]] == ["ours", "perseus", "zeus_global"]
    for name, policy in report["policies"].items():
        low, high = policy["saving_interval_percent"]
        assert low < policy["saving_percent"] < high, name
        assert len(policy["windows"]["window_energies_j"]) == 6
        assert output.count(f"│ {name}") == 1
    assert report["policies"]["ours"]["saving_percent"] == report["saving_percent"]
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    assert report["plan"]["iteration_energy_j"] == statistics.fmean(report["plan"]["window_energies_j"])
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert "lr-AdamW" in (tmp_path / "training" / "metrics.csv").read_text()


def test_a_model_of_transformers_that_a_config_names(tmp_path):
    size = ("model.options.num_hidden_layers=3", "model.options.hidden_size=16", "data.batch_size=8")
    online = ("plan=envpipe_envelope", "plan.online=true", "plan.scheduling=1f1b", "plan.threshold_scale=2")
    output = run_example("gpt", tmp_path, "model=llama_tiny", "schedule.num_microbatches=2", *online, *size).stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"]["identical"]
    # EnvPipe reconfigures in a training of its own, and ends with clocks of the profile.
    assert "changes of clocks the plan stays" in output
    assert load_frontier(tmp_path / "plans").policy == "envpipe_envelope_balanced_online"
    assert "policies" not in report
    for error in report["prediction_error_percent"]["plan"].values():
        assert abs(error) < 0.1
    assert report["losses"]["compared"] == 8  # the profile took no more
    assert report["settings"]["model"]["family"] == "llama"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "family", "layers"),
    [
        ("bert_tiny", "bert", "num_hidden_layers"),
        ("t5_tiny", "t5", "num_layers"),
        ("moe_tiny", "mixtral", "num_hidden_layers"),
    ],
)
def test_other_models_of_transformers_at_the_top_clocks(tmp_path, model, family, layers):
    size = (f"model.options.{layers}=2", "data.batch_size=8", "schedule.num_microbatches=2")
    run_example("gpt", tmp_path, f"model={model}", "plan=top_clocks", *size)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["model"]["family"] == family
    assert report["losses"]["identical"]
    assert report["losses"]["compared"] == 8


def test_resnet_at_the_top_clocks(tmp_path):
    run_example("resnet", tmp_path, "plan=top_clocks")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"]["identical"]
    assert report["predicted"]["plan"] == report["predicted"]["baseline"]
    assert 0 <= report["lower_bound_saving_percent"] < 100


def test_what_all_ranks_find_wrong_is_said_once(tmp_path):
    result = run_example("gpt", tmp_path, "+trainer.options.sync_batchnorm=true", expect_success=False)
    assert result.returncode == 1
    assert result.stdout.count("Error: pfo_pipeline runs batch norm on microbatches") == 1
    assert "Traceback" not in result.stdout
    assert not (tmp_path / "profile.csv").exists()


def rank_processes(process):
    """Process numbers of a script's ranks, the first one's first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            found += [int(path.name)] if os.getsid(int(path.name)) == process.pid else []
    return sorted(found, key=lambda pid: pid != process.pid)


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        (lambda ranks: os.killpg(ranks[0], signal.SIGINT), 130, "Interrupted."),
        (lambda ranks: os.kill(ranks[0], signal.SIGTERM), 143, "Terminated."),
        (lambda ranks: os.kill(ranks[1], signal.SIGKILL), 1, "died (its process has ended). The run cannot go on"),
    ],
    ids=["Ctrl-C", "SIGTERM", "a killed rank"],
)
def test_ranks_end_together(tmp_path, end, status, message):
    script = ROOT / "examples" / "gpt" / "train.py"
    endless = ("profiler.max_iterations_per_clock=1000000", "profiler.iterations_per_clock=1000000")
    process = start_script(script, *QUICK, *endless, "trainer.devices=3", f"output_dir={tmp_path}")
    try:
        for line in process.stdout:
            if "EnergyProfilerCallback: scanning" in line:
                break
        ranks = rank_processes(process)
        assert len(ranks) == 3
        end(ranks)
        output, _ = process.communicate(timeout=60)
        wait_until(lambda: session_is_empty(process))
    finally:
        kill_session(process)
    assert process.returncode == status, output
    assert message in output
    if status > 1:
        assert output.count(message) == 1
        assert "Traceback" not in output


def test_one_run_measures_plans_verifies_and_reports(tmp_path):
    overrides = ("gpu=emulated_a40", "plan=auto", "plan.select=1.02x", "profiler.min_clock_mhz=1000", "model=gpt_tiny")
    output = run_example("gpt", tmp_path, *overrides).stdout
    for text in ("1/2 Training under '1.02x'", "Verify -> Hold", "EMULATED", "those without the optimizer: identical"):
        assert output.count(text) == 1, output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"]["identical"], report["losses"]
    assert report["losses"]["compared"] == 8
    assert 0 < report["saving_percent"] < report["lower_bound_saving_percent"] + 0.5
    assert report["slowdown_percent"] < 2.5
    assert report["saving_interval_percent"] is None  # of two pairs
    assert {"profiling_cost_j", "profiling_cost_s", "net_saving_j", "notes"} <= set(report)
    assert [step["state"] for step in report["steps"]][-1] in ("Verify", "Hold")
    frontier = load_frontier(tmp_path / "plans")
    assert min(mhz for row in frontier.least_energy.clocks_mhz for mhz in row) >= 1000
    names = {path.name for path in tmp_path.iterdir()}
    assert {"report.html", "optimizer.json", "profile.csv", "frontier.png", "windows.png"} <= names
    assert "emulated" in (tmp_path / "report.html").read_text()
