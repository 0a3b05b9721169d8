"""Training loops against a server that runs as users run it; clocks are seen in the fake driver's log."""

import json
from pathlib import Path

import pytest

from lightning_pfo.planner import select_plan
from tests.callbacks.test_clock_safety import environment_of
from tests.device.fake_driver import fake_driver  # noqa: F401
from tests.example_scripts import ROOT
from tests.launch import run_script
from tests.loops.launching import run_with_torchrun
from tests.server.running import running_server

pytestmark = pytest.mark.slow
EXAMPLE = ROOT / "examples" / "served_plan" / "train.py"
SCRIPT = Path(__file__).parents[1] / "client" / "scripts" / "train_loop.py"


def clocks_of(driver, gpu):
    return [change.clock_mhz for change in driver.changes() if change.gpu == gpu]


def without_repeats(clocks_mhz):
    return [now for before, now in zip([None, *clocks_mhz], clocks_mhz, strict=False) if now != before]


def test_both_clients_train_under_the_plan_of_one_server(fake_driver, frontier, frontier_dir, tmp_path):  # noqa: F811
    plan = select_plan(frontier, "1.1x")
    assert len({mhz for row in plan.clocks_mhz for mhz in row}) > 1
    with running_server(f"frontier={frontier_dir}", "select=1.1x", "port=0", f"state={tmp_path}/state") as server:
        environment = environment_of(fake_driver)
        run_script(SCRIPT, server.url, "zeus", 3, tmp_path / "zeus", **environment)
        for rank, row in enumerate(plan.clocks_mhz):
            # Zeus's controller begins at the top and resets at the end; it sets every clock in order
            assert without_repeats([1410, *row, *row, *row]) == clocks_of(fake_driver, rank)[:-1]
            assert clocks_of(fake_driver, rank)[-1] is None
        fake_driver.log_path.unlink()
        output = run_script(SCRIPT, server.url, "ours", 4, tmp_path / "ours", **environment).stdout
        status, jobs = server.ask("GET", "/jobs")
        arguments = ("--server", server.url, "--microbatches", 3, "--steps", 4)
        told = run_with_torchrun(EXAMPLE, *arguments, **environment).stdout
    assert "step 3: loss" in told
    assert "the loop runs" not in told  # torch's 1F1B is ours
    assert "The plan has backward as instruction 2 of a step, the loop runs forward" in output  # the evaluation
    for rank, row in enumerate(plan.clocks_mhz):
        clocks_mhz = clocks_of(fake_driver, rank)
        assert clocks_mhz[-1] is None  # restored
        assert {*clocks_mhz} <= {*row, 1410, None}  # a clock may be overtaken by the next one, which counts
        assert {*row} <= {*clocks_mhz}
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []
    assert status == 200
    assert [(job["world_size"], len(job["ranks"]), job["plan"]["label"]) for job in jobs] == [(2, 2, "1.1x")] * 2
    steps = [json.loads((tmp_path / f"ours-{rank}.json").read_text()) for rank in (0, 1)]
    assert steps[0] == steps[1] == [[step, 1, "plan", "1.1x"] for step in range(4)]


def test_a_job_is_scanned_planned_verified_and_held_while_it_trains(fake_driver, tmp_path):  # noqa: F811
    (tmp_path / "enough").touch()
    settings = ("online=true", "num_microbatches=3", "clock_step_mhz=500", "effort=fast", "num_plans=4")
    with running_server(*settings, "verify_pairs=1", "port=0", f"state={tmp_path}/state.sqlite") as server:
        output = run_script(SCRIPT, server.url, "ours", 4000, tmp_path / "ours", **environment_of(fake_driver)).stdout
        _, (job,) = server.ask("GET", "/jobs")
    assert "Traceback" not in output
    assert job["plan"]["purpose"] == "plan"
    steps = [json.loads((tmp_path / f"ours-{rank}.json").read_text()) for rank in (0, 1)]
    assert steps[0] == steps[1]  # all ranks change plans at the same step
    labels = list(dict.fromkeys(label for *_, label in steps[0]))
    windows = ["window 1 of 2: top clocks", "window 2 of 2: no_slowdown"]
    assert labels[:5] == ["1410 MHz", "900 MHz", "390 MHz", *windows]
    others = labels[5:]  # held, or what is tried instead first: the host's noise decides
    assert others
    assert all("no_slowdown" in label for label in others)
    assert fake_driver.locked_gpus() == {}
    profile = next((tmp_path / "state.jobs").glob("*/profile.csv")).read_text().splitlines()
    assert len(profile) == 1 + 4 * 3
