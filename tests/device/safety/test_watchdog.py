"""Killed with SIGKILL, nothing can be restored from within: leases and the watchdog do it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_pfo.device.safety import watchdog, watching
from lightning_pfo.device.safety.process_id import process_of
from tests.device.fake_driver import PROJECT, FakeDriver, fake_driver
from tests.device.processes import children_of, run, start
from tests.waiting import wait_until

__all__ = ["fake_driver"]

NUM_KILLS = int(os.environ.get("LIGHTNING_PFO_TEST_KILLS", "48"))


def test_nothing_stays_locked_after_kills_at_random_moments(fake_driver: FakeDriver) -> None:
    environment = fake_driver.environment(num_gpus=8)
    command = [sys.executable, "-m", "tests.device.killed_processes", str(NUM_KILLS), "7"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    changes = fake_driver.changes()
    assert len({change.pid for change in changes if change.clock_mhz is not None}) > NUM_KILLS // 4
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []
    print(done.stdout)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_the_watchdog_restores_and_says_so(signum: signal.Signals, fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "slow")
    lease = json.loads(fake_driver.leases()[0].read_text())
    assert lease["version"] == 1
    assert lease["holder"]["pid"] == process.pid
    assert lease["gpu_uuid"] == "GPU-00000000-fake"
    assert lease["found"] == {"graphics_clock_mhz": 1410, "memory_clock_mhz": 1593, "power_limit_mw": 400000}
    assert lease["changed"] == ["graphics_clock"]
    process.send_signal(signum)
    _, stderr = process.communicate(timeout=60)  # until the watchdog ends: it holds stderr
    assert f"process {process.pid} left clocks changed; restored those of Fake GPU 0" in stderr
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []
    (reset,) = [change for change in fake_driver.changes() if change.clock_mhz is None]
    assert reset.pid != process.pid


def wait_while_refused(process: subprocess.Popen[str], lost: Path) -> None:
    """Kill a process whose GPU takes no changes any more; the watchdog has tried so often as to be late."""
    process.send_signal(signal.SIGSTOP)
    lost.touch()
    process.kill()
    assert process.stderr is not None
    assert any("It is tried again for 10 minutes" in line for line in iter(process.stderr.readline, ""))


def test_the_watchdog_goes_on_trying_where_the_driver_refuses(fake_driver: FakeDriver, tmp_path: Path) -> None:
    process = start(fake_driver.environment(lost_file=tmp_path / "lost"), "nvml", "slow")
    wait_while_refused(process, tmp_path / "lost")
    assert fake_driver.locked_gpus().keys() == {0}
    assert len(fake_driver.leases()) == 1  # so the next start would restore, too
    (tmp_path / "lost").unlink()
    _, stderr = process.communicate(timeout=60)  # until the watchdog ends
    assert f"process {process.pid} left clocks changed; restored those of Fake GPU 0" in stderr
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []


@pytest.mark.slow
def test_who_reads_what_it_says_need_not_wait_where_the_driver_refuses_for_long(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    process = start(fake_driver.environment(lost_file=tmp_path / "lost"), "nvml", "slow")
    wait_while_refused(process, tmp_path / "lost")
    _, stderr = process.communicate(timeout=120)
    assert "This goes on in silence." in stderr
    assert fake_driver.locked_gpus().keys() == {0}
    (tmp_path / "lost").unlink()
    wait_until(lambda: not fake_driver.leases())  # the watchdog lives
    assert fake_driver.locked_gpus() == {}


def test_what_the_next_start_has_restored_the_watchdog_leaves_alone(fake_driver: FakeDriver, tmp_path: Path) -> None:
    environment = fake_driver.environment(lost_file=tmp_path / "lost")
    process = start(environment, "nvml", "slow")
    wait_while_refused(process, tmp_path / "lost")
    (tmp_path / "lost").unlink()
    done = run(environment, "from lightning_pfo.device import open_gpu; open_gpu('nvml', 0)")
    assert f"which the crashed process {process.pid} had left locked" in done.stderr
    assert process.communicate(timeout=60)[1] == ""
    assert len([change for change in fake_driver.changes() if change.clock_mhz is None]) == 1


def test_the_watchdog_gives_up_after_ten_minutes() -> None:
    pauses_s = [*watchdog._RETRIES_AFTER_S, *watchdog._LATER_RETRIES_AFTER_S]
    assert pauses_s == sorted(pauses_s)
    assert max(pauses_s) == 10
    assert sum(pauses_s) == pytest.approx(600, abs=10)
    assert sum(watchdog._RETRIES_AFTER_S) < 5


def test_a_forked_child_does_not_keep_the_watchdog_waiting(fake_driver: FakeDriver) -> None:
    script = """
import os, signal, time
from lightning_pfo.device import open_gpu
gpu = open_gpu("nvml", 0)
gpu.lock_graphics_clock(1200)
if os.fork() == 0:
    os.close(1), os.close(2)
    gpu.close()  # not the child's to restore
    time.sleep(30)
    os._exit(0)
time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
    started_s = time.monotonic()
    done = run(fake_driver.environment(), script)
    assert done.returncode == -signal.SIGKILL
    assert "restored those of" in done.stderr
    assert time.monotonic() - started_s < 25
    assert fake_driver.locked_gpus() == {}


EXEC = """
import os, sys, time
from lightning_pfo.device import open_gpu
from lightning_pfo.core.errors import DeviceError
gpu = open_gpu("nvml", 0)
if len(sys.argv) == 1:
    gpu.lock_graphics_clock(600)
    if {kills_watchdog}:
        gpu._claim._watchdog.kill()
        gpu._claim._watchdog.wait()
    os.execv(sys.executable, [sys.executable, __file__, "second"])
deadline_s = time.monotonic() + 30
while gpu.graphics_clock_mhz() != 1410 and time.monotonic() < deadline_s:
    time.sleep(0.01)
print(gpu.graphics_clock_mhz())
gpu.claim_clocks()
gpu.lock_graphics_clock(705)
try:
    open_gpu("nvml", 0).claim_clocks()
except DeviceError as error:
    print(error)
time.sleep({sleep_s})
print(gpu.graphics_clock_mhz())
gpu.close()
"""


@pytest.mark.parametrize("kills_watchdog", [False, True])
def test_a_program_that_replaces_itself_finds_its_clocks_restored(
    kills_watchdog: bool, fake_driver: FakeDriver, tmp_path: Path
) -> None:
    """`exec` runs no exit handlers, and the process keeps its number and start time."""
    script = tmp_path / "restarts.py"
    script.write_text(EXEC.format(kills_watchdog=kills_watchdog, sleep_s=0.0 if kills_watchdog else 0.5))
    done = subprocess.run(
        [sys.executable, script], env=fake_driver.environment(), capture_output=True, text=True, timeout=60, check=False
    )
    restored, refused, own = done.stdout.splitlines()
    assert (restored, own) == ("1410", "705"), done.stderr  # the earlier watchdog leaves the new claim alone
    assert ", this process itself. " in refused
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []


def test_clocks_are_restored_although_the_folder_of_leases_is_removed(fake_driver: FakeDriver) -> None:
    script = """
import os, shutil, signal
from lightning_pfo.device import open_gpu
gpus = [open_gpu("nvml", index) for index in range(3)]
gpus[0].lock_graphics_clock(1200)
gpus[1].claim_clocks()
gpus[2].lock_graphics_clock(1200)
gpus[2].restore()
shutil.rmtree(os.environ["LIGHTNING_PFO_RUNTIME_DIR"])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(fake_driver.environment(num_gpus=3), script)
    assert done.returncode == -signal.SIGKILL
    assert "restored those of Fake GPU 0" in done.stderr
    assert fake_driver.locked_gpus() == {}
    resets = [change.gpu for change in fake_driver.changes() if change.clock_mhz is None]
    assert sorted(resets) == [0, 2]  # what was not changed, or was restored, is not touched


def test_what_was_restored_by_force_and_claimed_by_another_is_not_touched(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "slow")
    process.send_signal(signal.SIGSTOP)
    force = [sys.executable, "-m", "lightning_pfo", "restore-clocks", "force=true"]
    subprocess.run(force, env=fake_driver.environment(), check=True, timeout=60)
    other = start(fake_driver.environment(), "nvml", "slow")
    process.kill()
    assert process.communicate(timeout=60)[1] == ""  # until its watchdog has ended, which has nothing to say
    assert fake_driver.locked_gpus().keys() == {0}
    other.terminate()
    other.communicate(timeout=60)
    assert fake_driver.locked_gpus() == {}


def test_modules_in_the_job_s_folder_do_not_keep_the_watchdog_from_starting(
    fake_driver: FakeDriver, tmp_path: Path
) -> None:
    (tmp_path / "select.py").write_text("raise ImportError('not the one you want')\n")
    script = tmp_path / "elsewhere" / "train.py"
    script.parent.mkdir()
    script.write_text(
        "import os, signal\nfrom lightning_pfo.device import open_gpu\n"
        "open_gpu('nvml', 0).lock_graphics_clock(1200)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=fake_driver.environment() | {"PYTHONPATH": str(PROJECT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "restored those of Fake GPU 0" in done.stderr
    assert fake_driver.locked_gpus() == {}


def test_ctrl_c_and_term_to_everybody_leave_the_watchdog_alone(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "slow")
    (watchdog,) = children_of(process.pid)
    wait_until(lambda: Path(f"/proc/{watchdog}/stat").read_text().rpartition(")")[2].split()[0] == "S")
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watchdog, signum)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert fake_driver.locked_gpus() == {}


def test_the_watchdog_imports_nothing_heavy() -> None:
    heavy = {"torch", "lightning", "omegaconf", "numpy", "pandas", "hydra", "pynvml"}
    script = f"import sys, lightning_pfo.device.safety.watchdog; print(sorted({heavy} & set(sys.modules)))"
    done = run(dict(os.environ) | {"PYTHONPATH": str(PROJECT)}, script)
    assert done.stdout == "[]\n", done.stderr


def test_nothing_is_changed_before_the_watchdog_is_ready(fake_driver: FakeDriver, tmp_path: Path) -> None:
    never_ready = tmp_path / "python"
    never_ready.write_text("#!/bin/sh\nexec sleep 60\n")
    never_ready.chmod(0o755)
    script = f"""
import sys
from lightning_pfo.device import open_gpu
from lightning_pfo.device.safety import watching
watching._READY_TIMEOUT_S = 0.0
sys.executable = {str(never_ready)!r}
gpu = open_gpu("nvml", 0)
try:
    gpu.lock_graphics_clock(1200)
except Exception as error:
    print(error)
"""
    assert "that of Fake GPU 0 was not ready within 0 s" in run(fake_driver.environment(), script).stdout
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []


def test_an_installed_package_is_found_without_pythonpath(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "relative")
    assert watching._environment()["PYTHONPATH"] == f"{PROJECT}:{Path('relative').absolute()}"
    monkeypatch.setattr(watching.site, "getsitepackages", lambda: [str(PROJECT)])
    assert watching._environment()["PYTHONPATH"] == "relative"


class Emptied(socket.socket):
    """Can be read, until the trainer is quicker."""

    def recv(self, *args: int) -> bytes:
        super().recv(1)
        return super().recv(*args)


def test_a_watchdog_outlives_a_trainer_that_acts_on_a_signal_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, trainers = socket.socketpair()
    ours.setblocking(False)
    received = Emptied(fileno=ours.detach())
    trainer = subprocess.Popen(["sleep", "60"])
    holder = process_of(trainer.pid, None)
    looks = []

    def select_then_kill(*args: object) -> object:
        looks.append(select_once(*args))
        if len(looks) == 2:
            trainer.kill()
            trainer.wait()
        return looks[-1]

    select_once = watchdog.select.select
    monkeypatch.setattr(watchdog.select, "select", select_then_kill)
    trainers.send(bytes([signal.SIGTERM]))
    with received, trainers:
        watchdog._wait_for_end(SimpleNamespace(lease=SimpleNamespace(holder=holder)), received)
    assert looks[0][0] == [received]
    assert len(looks) == 2
