"""Whatever ends a training under a plan, no GPU stays locked; the real pynvml on a fake driver."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

from tests.device.fake_driver import fake_driver  # noqa: F401
from tests.launch import kill_session, run_script, session_is_empty, start_script

SCRIPT = Path(__file__).parent / "scripts" / "train_on_nvml.py"
DEVICES = 2


def environment_of(driver, scenario="normal", **settings):
    environment = driver.environment(scenario, num_gpus=DEVICES, **settings)
    names = ("LD_LIBRARY_PATH", "LIGHTNING_PFO_RUNTIME_DIR")
    return {name: value for name, value in environment.items() if name in names or name.startswith("FAKE_NVML_")}


def test_clocks_follow_the_plan_and_are_restored_at_the_end(fake_driver):  # noqa: F811
    output = run_script(SCRIPT, "return", "forks", **environment_of(fake_driver)).stdout
    assert "finished 6" in output
    changes = fake_driver.changes()
    assert {change.gpu for change in changes} == {0, 1}
    assert {change.clock_mhz for change in changes} <= {1410, 1395, 1380, None}
    assert sum(change.clock_mhz is not None for change in changes) > 4
    assert fake_driver.locked_gpus() == {}


def test_an_exception_restores_the_clocks(fake_driver):  # noqa: F811
    result = run_script(SCRIPT, "exception", "forks", expect_success=False, **environment_of(fake_driver))
    assert result.returncode != 0
    assert "the user's own mistake" in result.stdout
    assert fake_driver.changes()
    assert fake_driver.locked_gpus() == {}


def test_a_signal_restores_the_clocks_and_leaves_no_process(fake_driver, tmp_path):  # noqa: F811
    """To all processes, as Ctrl-C in a terminal or as torchrun does, or to the one that a batch system started."""
    jobs = []
    try:
        for launch, signum, to_all in [
            ("popen", signal.SIGINT, True),  # here the other rank imports all anew
            ("clone", signal.SIGINT, True),
            ("clone", signal.SIGTERM, False),
            ("forks", signal.SIGTERM, True),
        ]:
            (folder := tmp_path / f"{launch}_{signum.name}").mkdir()
            driver = replace(fake_driver, log_path=folder / "clock_changes.log")
            process = start_script(SCRIPT, "signal", launch, **environment_of(driver))
            jobs.append((driver, process, os.killpg if to_all else os.kill, signum))
        for driver, process, send, signum in reversed(jobs):  # those that train first: training is what costs
            for line in process.stdout:
                if line.strip() == "training":
                    break
            assert driver.locked_gpus()
            send(process.pid, signum)
        for driver, process, *sent in jobs:
            process.communicate(timeout=60)
            deadline = time.monotonic() + 20
            while not session_is_empty(process) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert session_is_empty(process), sent
            assert driver.locked_gpus() == {}, sent
    finally:
        for _, process, *_ in jobs:
            kill_session(process)


def test_without_permission_training_goes_on_with_one_warning(fake_driver):  # noqa: F811
    output = run_script(SCRIPT, "return", "forks", **environment_of(fake_driver, "no_permission")).stdout
    assert "finished 6, failed: ['rank 0', 'rank 1']" in output
    assert output.count("Training goes on without clock control") == 1
    assert fake_driver.changes() == []


def test_the_failure_of_any_rank_is_told_by_the_first(fake_driver):  # noqa: F811
    output = run_script(SCRIPT, "return", "forks", **environment_of(fake_driver, kept_gpu=1)).stdout
    assert output.count("no clocks are set by rank 1 (Fake GPU 1): Locking Fake GPU 1 at") == 1
    assert "finished 6, failed: ['rank 1']" in output
    assert {change.gpu for change in fake_driver.changes()} == {0}


def test_a_scan_stops_on_all_ranks_where_one_may_not_set_clocks(fake_driver, tmp_path):  # noqa: F811
    (job := tmp_path / "job").mkdir()
    output = run_script(SCRIPT, "profile", "forks", job, **environment_of(fake_driver, kept_gpu=1)).stdout
    error = "A frequency scan sets clocks, which rank 1 cannot: Locking Fake GPU 1 at 1410 MHz failed"
    assert output.count("The scan has stopped on all ranks; it writes no profile. Training goes on") == 1
    assert output.count(f"finished True {error}") == DEVICES
    assert "CAP_SYS_ADMIN" in output
    assert list(job.iterdir()) == []
    assert fake_driver.locked_gpus() == {}


def test_gpus_that_others_compute_on_keep_their_clocks_and_training_goes_on(fake_driver):  # noqa: F811
    output = run_script(SCRIPT, "return", "forks", **environment_of(fake_driver, processes="1:4000000")).stdout
    assert "finished 6, failed: ['rank 0', 'rank 1']" in output
    assert output.count("Training goes on without clock control on all ranks, as rank 1 meets: Clocks are set on") == 1
    assert "1 process of others compute on it (4000000)" in output
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []


def test_a_killed_rank_leaves_no_gpu_locked(fake_driver):  # noqa: F811
    process = start_script(SCRIPT, "signal", "forks", **environment_of(fake_driver))
    try:
        for line in process.stdout:
            if line.strip() == "training":
                break
        locking = {change.gpu: change.pid for change in fake_driver.changes()}
        assert set(locking) == {0, 1}
        os.kill(locking[1], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while 1 in fake_driver.locked_gpus() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert 1 not in fake_driver.locked_gpus()  # while the other rank may still wait for it
    finally:
        kill_session(process)  # SIGKILL for all others; the watchdogs are in sessions of their own
    deadline = time.monotonic() + 60
    while fake_driver.leases() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fake_driver.leases() == []
    assert fake_driver.locked_gpus() == {}


def test_a_second_job_on_the_same_gpus_leaves_their_clocks_alone(fake_driver):  # noqa: F811
    first = start_script(SCRIPT, "signal", "forks", **environment_of(fake_driver))
    try:
        for line in first.stdout:
            if line.strip() == "training":
                break
        holder = next(change.pid for change in fake_driver.changes() if change.gpu == 0)
        second = run_script(SCRIPT, "return", "forks", **environment_of(fake_driver)).stdout
        assert second.count(f"are held by process {holder}, another job") == 1
        assert "finished 6, failed: ['rank 0', 'rank 1']" in second
        assert len({change.pid for change in fake_driver.changes()}) == DEVICES
    finally:
        kill_session(first)
