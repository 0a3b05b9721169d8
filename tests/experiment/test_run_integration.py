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

QUICK = ("trainer=quick", "profiler=quick", "trainer.progress_bar=false")


def run_example(name, output_dir, *overrides, **options):
    script = ROOT / "examples" / name / "train.py"
    return run_script(script, *QUICK, f"output_dir={output_dir}", *overrides, timeout_s=120, **options)


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
    output = run_example("gpt", tmp_path, "gpu=emulated_a40", "plan=slowdown_2_percent", fresh=True).stdout
    for text in ("1/4 Profiling 2 stages x 8 microbatches", "4/4 Training 4 steps", "EMULATED"):
        assert output.count(text) == 1, output  # said once, by rank 0

    report = json.loads((tmp_path / "report.json").read_text())
    assert "emulated" in report["device"]
    assert report["losses"]["identical"], report["losses"]
    assert len(report["losses"]["plan"]) == 4
    assert report["losses"]["plan"][-1] < report["losses"]["plan"][0]
    for run in ("baseline", "plan"):
        assert len(report[run]["iteration_times_s"]) == 3  # four steps, one of them warm-up
        assert report[run]["iteration_time_s"] == statistics.median(report[run]["iteration_times_s"])
        assert report[run]["iteration_energy_j"] > 0
        assert report[run]["clocks"]["num_changes"] > 0
        assert report[run]["val_loss"] > 0
        assert list(report[run]["clocks_of_ranks"]) == ["rank 0", "rank 1"]
        assert report[run]["clocks_of_ranks"]["rank 0"] == report[run]["clocks"]
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

    for folder, run in (("top_clocks", "baseline"), ("plan", "plan")):
        with (tmp_path / folder / "metrics.csv").open() as file:
            logged = [float(row["pfo/iteration_time_s"]) for row in csv.DictReader(file) if row["pfo/iteration_time_s"]]
        assert logged[-3:] == pytest.approx(report[run]["iteration_times_s"], rel=1e-4)
    for picture in ("frontier", "timelines", "energy_valleys", "losses"):
        assert (tmp_path / f"{picture}.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_of_transformers_that_a_config_names(tmp_path):
    size = ("model.options.num_hidden_layers=3", "model.options.hidden_size=16", "data.batch_size=8")
    run_example("gpt", tmp_path, "model=llama_tiny", "schedule.num_microbatches=2", "plan=top_clocks", *size)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["losses"]["identical"]
    assert report["settings"]["model"]["family"] == "llama"


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
        (lambda ranks: os.kill(ranks[1], signal.SIGKILL), 1, "died (its process has ended). The run cannot go on"),
    ],
    ids=["Ctrl-C", "a killed rank"],
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
    if status == 130:
        assert output.count(message) == 1
        assert "Traceback" not in output
