"""Processes started by a script, cloned, forked, spawned, by torchrun on two nodes, SLURM; and what if one dies."""

import json
import re
import socket
import time
from pathlib import Path

import pytest

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.launch import TORCHRUN, kill_session, run_script, session_is_empty, start_script

SCRIPT = Path(__file__).parents[1] / "scripts" / "launching.py"


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def read(folder, name):
    return json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def forked(tmp_path_factory):
    """The folder, and what was printed by each part."""
    folder = tmp_path_factory.mktemp("forked")
    output = run_script(SCRIPT, "forks", folder, free_port()).stdout
    parts = re.split(r"^== (.*)$", output, flags=re.MULTILINE)
    return folder, dict(zip(parts[1::2], parts[2::2], strict=True)) | {"slurm": parts[0]}


def test_slurm_saves_requeues_and_resumes_though_one_task_was_signalled(forked):
    folder, parts = forked
    assert "slurm [0, 0]" in parts["slurm"]
    seen = [read(folder, f"slurm_{rank}") for rank in (0, 1)]
    assert seen[0] == seen[1]
    assert seen[0]["environment"] == "SLURMEnvironment"
    uninterrupted, resumed = seen[0]["runs"]
    assert len(uninterrupted) == 8
    assert resumed == pytest.approx(uninterrupted[4:], abs=1e-6)
    assert (folder / "scontrol.log").read_text() == "requeue 4321\n"


@pytest.mark.parametrize(
    ("way", "rank", "survivors", "reason"),
    [
        ("killed", 1, (0, 2), r"died \(its process has ended\)"),
        ("left", 2, (0, 1), r"died \(its process has ended\)"),
        ("failed", 2, (0, 1), "failed with ValueError: the user's own mistake"),
        ("hub", 0, (1, 2), r"died \(its process has ended\)"),
    ],
)
def test_a_dead_rank_is_named_by_the_others_which_end(forked, way, rank, survivors, reason):
    _, parts = forked
    for survivor in survivors:
        assert re.search(rf"^Rank {survivor}: rank {rank}\b.* {reason}", parts[way], re.MULTILINE), parts[way]
    assert re.search(r"^(ProcessExitedException|ProcessRaisedException)", parts[way], re.MULTILINE)


def test_the_watch_ends_what_waits_elsewhere(forked):
    _, parts = forked
    assert "[1, 1, 5]" in parts["a rank that waits elsewhere is ended"]
    goes_on = parts["a rank that failed and goes on"]
    assert "[1, 1, 0]" in goes_on
    assert re.search(r"is ended, because rank 2 .* failed with ValueError: caught by the user", goes_on)


@pytest.mark.parametrize("part", ["ends that are no deaths", "the hub may leave first"])
def test_ranks_may_end_one_after_another(forked, part):
    assert "[0, 0, 0]" in forked[1][part]
    assert "died" not in forked[1][part]


def test_a_rank_that_left_between_runs_is_missed_in_the_next(forked):
    assert re.search(r"begin: rank 2 .* died", forked[1]["a rank that has left is missed later"])


def test_spawned_processes_give_the_whole_model_back(forked):
    seen = read(forked[0], "spawn")
    assert not any(seen["meta"])
    assert seen["whole"]
    assert seen["validated"][0]["val_loss"] == pytest.approx(seen["loss"], abs=1e-6)


@pytest.fixture(scope="module", params=["clones", "clones_of_threads"])
def cloned(request, tmp_path_factory):
    """The part, its folder, its output and exit code, and whether no process was left."""
    folder = tmp_path_factory.mktemp(request.param)
    process = start_script(SCRIPT, request.param, folder)
    try:
        output, _ = process.communicate(timeout=180)
        deadline = time.monotonic() + 20
        while not (empty := session_is_empty(process)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        kill_session(process)
    return request.param, folder, output, process.returncode, empty


def test_a_killed_child_of_a_script_ends_it_and_leaves_no_process(cloned):
    """A clone, and, where there are threads, a child that runs the script anew."""
    *_, output, status, empty = cloned
    assert empty
    assert status == 1, output
    assert re.search(r"RankDiedError: rank 1 \(pid \d+ on .*\) died", output), output


def test_clones_go_on_with_the_script_unless_forks_would_lack_threads(forked, cloned):
    part, folder, output, *_ = cloned
    assert output.count("before the fit") == {"clones": 1, "clones_of_threads": 2}[part]
    assert output.count("have no `val_dataloader`") == 1  # by the first rank, and Python says it once in a process
    seen = [read(folder, f"{part}_{rank}") for rank in (0, 1)]
    assert [of_rank["ranks"] for of_rank in seen] == [[0, 0, 2], [1, 1, 2]]
    assert seen[1]["processes"][0] == seen[0]["processes"][1]
    assert seen[0]["validated"] == seen[1]["validated"]
    for of_rank in seen:
        for losses in of_rank["losses"]:
            assert losses == pytest.approx(read(forked[0], "slurm_0")["runs"][0], abs=1e-6)


def test_ranks_know_who_they_are_before_they_are_connected(cloned):
    part, folder, *_ = cloned
    first, second = [0, True, 2], [1, False, 2]
    assert read(folder, f"{part}_0")["early"] == [first] * 5
    # who is cloned was the first when the first Trainer was made
    assert read(folder, f"{part}_1")["early"] == [first if part == "clones" else second] + [second] * 4


def test_forks_of_a_process_in_which_torch_has_threads_are_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CLONING)
    assert re.fullmatch(r"None\n3 -15\nthis process has [23] threads\n", run_script(script).stdout)


CLONING = """
import os, signal, time
import torch
from lightning_pfo.strategy.trainer.clones import clone_process, why_not_clone

print(why_not_clone())
clone = clone_process()
if clone is None:
    os._exit(3)
while clone.poll() is None:
    time.sleep(0.01)
clone.send_signal(signal.SIGTERM)  # too late
sleeper = clone_process()
if sleeper is None:
    time.sleep(60)
sleeper.send_signal(signal.SIGTERM)
while sleeper.poll() is None:
    time.sleep(0.01)
torch.set_num_threads(2)
torch.ones(1_000_000).add_(1)  # large enough for both
print(clone.returncode, sleeper.returncode)
print(why_not_clone())
"""


def test_two_torchrun_nodes_train_evaluate_and_notice_a_death(forked, tmp_path):
    torchrun = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    nodes = [start_script(TORCHRUN, *torchrun, f"--node-rank={rank}", SCRIPT, "node", tmp_path) for rank in (0, 1)]
    try:
        outputs = [node.communicate(timeout=240)[0] for node in nodes]
    finally:
        for node in nodes:
            kill_session(node)
    seen = [read(tmp_path, f"node_{rank}") for rank in (0, 1)]
    assert [part.pop("ranks") for part in seen] == [[0, 0, 2], [1, 1, 2]]
    assert seen[0] == seen[1]
    assert seen[0]["losses"] == pytest.approx(read(forked[0], "slurm_0")["runs"][0], abs=1e-6)
    assert seen[0]["validate"][0]["val_loss"] == pytest.approx(seen[0]["test"][0]["test_loss"], abs=1e-6)
    assert len(seen[0]["predict"]) == 37
    assert re.search(r"RankDiedError: rank 1 \(pid \d+ on .*\) died", outputs[0]), outputs[0]
    assert all(node.returncode != 0 for node in nodes)


def test_an_unknown_start_method_is_refused():
    methods = "popen, clone, spawn, fork, forkserver"
    with pytest.raises(ConfigurationError, match=f"start_method is one of {methods}; got 'thread'"):
        PfoPipelineStrategy(start_method="thread")


@pytest.mark.parametrize(
    ("signum", "status", "reason"),
    [("SIGINT", 130, "it was interrupted"), ("SIGTERM", 1, "rank 1 ended with code -15")],
)
def test_a_process_that_ends_before_it_connects_ends_the_others(tmp_path, signum, status, reason):
    script = tmp_path / "script.py"
    script.write_text(EARLY_END)
    result = run_script(script, signum, expect_success=False)
    assert result.returncode == status
    assert f"This process is ended, because {reason}" in result.stdout.replace("the process of local ", "")


EARLY_END = """
import signal, subprocess, sys, time
from types import SimpleNamespace
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning_pfo.strategy.trainer.launchers import ScriptLauncher, _checked_until_connected

launcher = ScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
launcher.procs.append(subprocess.Popen(["sleep", "60"]))
with _checked_until_connected(SimpleNamespace(rank_watch=None), launcher._check_children):
    launcher.procs[0].send_signal(getattr(signal, sys.argv[1]))
    time.sleep(60)
"""
