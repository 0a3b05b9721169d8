"""`lightning-pfo restore-clocks`: on the fake driver, and which leases it undoes."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo.cli import main
from lightning_pfo.cli.restore_clocks import Settings
from lightning_pfo.cli.settings import read_settings
from lightning_pfo.device.safety.lease import DIRECTORY_VARIABLE, Lease, claimed_here, write_lease
from lightning_pfo.device.safety.process_id import this_process
from tests.device.fake_driver import PROJECT, FakeDriver, fake_driver
from tests.device.processes import kill_with_watchdog, start
from tests.waiting import wait_until

__all__ = ["fake_driver"]


def restore_clocks(environment: dict[str, str], *settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lightning_pfo", "restore-clocks", *settings]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_restore_clocks_by_hand(fake_driver: FakeDriver) -> None:
    assert "Nothing to restore" in restore_clocks(fake_driver.environment()).stdout
    process = start(fake_driver.environment(), "nvml", "slow")
    refused = restore_clocks(fake_driver.environment())
    assert refused.returncode == 2
    assert f"in use: process {process.pid} sets its clocks" in refused.stderr
    assert fake_driver.locked_gpus().keys() == {0}
    kill_with_watchdog(process)
    assert "no lease of a GPU GPU-1..." in restore_clocks(fake_driver.environment(), "uuid=GPU-1").stdout
    assert fake_driver.locked_gpus().keys() == {0}
    restored = restore_clocks(fake_driver.environment(), "uuid=GPU-0")
    assert restored.returncode == 0, restored.stderr
    assert f"its clocks are restored; process {process.pid} had claimed them" in restored.stdout
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []


def test_restore_clocks_by_force_takes_a_living_process_s_lock(fake_driver: FakeDriver) -> None:
    script = """
import time
from lightning_pfo.device import open_gpu
gpu = open_gpu("nvml", 0)
gpu.lock_graphics_clock(600)
time.sleep(60)
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=fake_driver.environment())
    wait_until(lambda: bool(fake_driver.locked_gpus()))
    assert restore_clocks(fake_driver.environment(), "force=true").returncode == 0
    assert fake_driver.locked_gpus() == {}
    process.kill()
    process.wait()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act for two users")
def test_an_administrator_restores_what_dead_jobs_of_all_users_left(
    fake_driver: FakeDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what living ones hold, and no file that somebody has laid there."""
    dead, living = replace(this_process(), start_ticks=1), this_process()
    folders = {1001: "run/user/1001/lightning-pfo", 1002: "tmp/lightning-pfo-1002", 1003: "tmp/lightning-pfo-1004"}
    for (user, name), holder in zip(folders.items(), (dead, living, dead), strict=True):
        (folder := tmp_path / name).mkdir(parents=True)
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(folder))
        uuid = f"GPU-{str(user % 1000 - 1) * 8}-fake"
        write_lease(Lease(uuid, f"GPU of {user}", "nvml", holder, {}, ("graphics_clock",)))
        os.chown(folder, user, user)
    os.mkfifo(tmp_path / folders[1001] / "GPU-a.json")
    (tmp_path / "tmp" / "lightning-pfo-1005").symlink_to(tmp_path / folders[1002])
    done = restore_clocks(fake_driver.environment(num_gpus=3), "all=true", f"under={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "GPU of 1001 (GPU-00000000-fake): its clocks are restored" in done.stdout
    assert f"GPU of 1002 (GPU-11111111-fake): left alone, as process {os.getpid()} lives" in done.stdout
    assert "1003" not in done.stdout  # in a folder that is not named after its owner
    assert "GPU-a.json is not a regular file" in done.stderr
    assert [(change.gpu, change.clock_mhz) for change in fake_driver.changes()] == [(0, None)]


def test_the_recipes_are_readable_and_their_commands_exist() -> None:
    import yaml

    texts = {path.name: path.read_text() for path in (PROJECT / "recipes").rglob("*.*")}
    assert len(texts) == 6
    commands = [
        found for text in texts.values() for found in re.findall(r"lightning-pfo restore-clocks([ a-z=]*)", text)
    ]
    pod = yaml.safe_load(texts["pod.yaml"])
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        assert {"name": DIRECTORY_VARIABLE, "value": "/leases"} in container["env"]
        if container["command"][0] == "lightning-pfo":
            commands.append(" ".join(container["command"][2:]))
    assert sum("all=true" in command for command in commands) >= 4
    for command in commands:
        read_settings(Settings, command.split())
    for name in ("service", "timer"):
        configparser.ConfigParser(strict=False).read_string(texts[f"lightning-pfo-restore-clocks.{name}"])
    script = PROJECT / "recipes" / "slurm" / "restore_clocks.sh"
    subprocess.run(["sh", "-n", str(script)], check=True)


LEASES = {"GPU-aa11": "nvml", "GPU-aa22": "zeus", "GPU-bb33": "nvml"}


@pytest.fixture
def _leases(tmp_path, monkeypatch):
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    claimed_here.update(LEASES)
    for uuid, backend in LEASES.items():
        write_lease(Lease(uuid, f"GPU [/{backend}]", backend, this_process(), {}))  # held: it is named and left alone
    yield
    claimed_here.difference_update(LEASES)


@pytest.mark.usefixtures("_leases")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], LEASES),
        (["gpu=auto"], LEASES),
        (["gpu=nvml"], {"GPU-aa11", "GPU-bb33"}),
        (["gpu=zeus"], {"GPU-aa22"}),
        (["uuid=GPU-aa"], {"GPU-aa11", "GPU-aa22"}),
        (["gpu=nvml", "uuid=GPU-aa"], {"GPU-aa11"}),
    ],
)
def test_gpu_means_what_it_means_elsewhere(arguments, named, capsys):
    assert main(["restore-clocks", *arguments]) == 2
    error = capsys.readouterr().err
    assert {uuid for uuid in LEASES if uuid in error} == set(named)


@pytest.mark.usefixtures("_leases")
@pytest.mark.parametrize("arguments", [["gpu=emulated_a40"], ["uuid=GPU-cc"]])
def test_nothing_to_restore(arguments, capsys):
    assert main(["restore-clocks", *arguments]) == 0
    assert "Nothing to restore: no lease" in capsys.readouterr().out


@pytest.mark.usefixtures("_leases")
def test_an_unknown_gpu_is_refused(capsys):
    assert main(["restore-clocks", "gpu=GPU-aa11"]) == 2
    assert "For one GPU use uuid=GPU-aa11." in capsys.readouterr().err
    assert main(["restore-clocks", "gpu=nvm"]) == 2
    assert "gpu is one of auto, " in capsys.readouterr().err
