"""Killed with SIGKILL, nothing can be restored from within: leases and the watchdog do it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.safety import claim as clock_claim
from lightning_pfo.device.safety import lease as clock_lease
from lightning_pfo.device.safety import process_id
from lightning_pfo.device.safety.claim import ClockClaim
from lightning_pfo.device.safety.lease import Lease, exclusive
from lightning_pfo.device.safety.process_id import ProcessId, this_process
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.device.safety.test_guard import start

__all__ = ["fake_driver"]

NUM_KILLS = int(os.environ.get("LIGHTNING_PFO_TEST_KILLS", "48"))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def run(environment: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


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
        env=fake_driver.environment() | {"PYTHONPATH": str(Path(__file__).parents[3])},
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
    time.sleep(0.3)  # until it ignores signals
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watchdog, signum)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert fake_driver.locked_gpus() == {}


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()] or [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def kill_with_watchdog(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGSTOP)  # without its watchdog it would restore the clocks
    for child in children_of(process.pid):
        os.kill(child, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=60)


def test_the_next_start_repairs_what_killed_trainer_and_watchdog_left(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "slow")
    kill_with_watchdog(process)
    assert fake_driver.locked_gpus()
    done = run(fake_driver.environment(), "from lightning_pfo.device import open_gpu; open_gpu('nvml', 0)")
    assert f"which the crashed process {process.pid} had left locked" in done.stderr
    assert fake_driver.locked_gpus() == {}
    assert fake_driver.leases() == []


def test_a_second_job_on_the_same_gpu_is_refused_with_the_holder_s_pid(fake_driver: FakeDriver) -> None:
    process = start(fake_driver.environment(), "nvml", "slow")
    done = run(
        fake_driver.environment(),
        "from lightning_pfo.device import open_gpu; [open_gpu('nvml', index).claim_clocks() for index in (1, 0)]",
    )
    assert done.returncode == 1
    assert f"(GPU-00000000-fake) are held by process {process.pid}, another job" in done.stderr
    assert fake_driver.locked_gpus().keys() == {0}  # the refusal has not unlocked it
    process.terminate()
    process.communicate(timeout=60)
    assert fake_driver.leases() == []


def test_a_claim_alone_changes_nothing_even_if_killed(fake_driver: FakeDriver) -> None:
    script = """
import os, signal
from lightning_pfo.device import open_gpu
open_gpu("nvml", 0).claim_clocks()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run(fake_driver.environment(), script)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []


def test_without_permission_no_lease_is_left_and_nothing_is_reset(fake_driver: FakeDriver) -> None:
    script = """
from lightning_pfo.core.errors import ClockPermissionError
from lightning_pfo.device import open_gpu
gpu = open_gpu("nvml", 0)
try:
    gpu.lock_graphics_clock(1200)
except ClockPermissionError:
    print("refused")
"""
    done = run(fake_driver.environment("no_permission"), script)
    assert done.stdout == "refused\n", done.stderr
    assert fake_driver.changes() == []
    assert fake_driver.leases() == []


@pytest.fixture
def lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lease:
    monkeypatch.setenv(clock_lease.DIRECTORY_VARIABLE, str(tmp_path))
    return Lease("GPU-1", "Some GPU", "nvml", this_process(), {"power_limit_mw": None}, ("graphics_clock",))


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(
        "lightning_pfo.device.backends.nvml.unlock_graphics_clock", lambda uuid, found: calls.append(uuid)
    )
    return calls


def test_leases_survive_writing_and_reading(lease: Lease) -> None:
    assert clock_lease.read_lease("GPU-1") is None
    clock_lease.write_lease(lease)
    assert clock_lease.read_lease("GPU-1") == lease
    assert clock_lease.read_leases() == [lease]


def test_a_lease_of_a_living_process_is_left_alone(lease: Lease, unlocked: list[str]) -> None:
    clock_lease.write_lease(lease)
    assert clock_claim.undo_stale("GPU-1") is None
    assert clock_claim.undo_stale("GPU-1", even_alive=True) == lease
    assert unlocked == ["GPU-1"]
    assert clock_lease.read_lease("GPU-1") is None


def test_a_reused_process_number_is_not_taken_for_the_holder(lease: Lease, unlocked: list[str]) -> None:
    me = lease.holder
    assert me.start_ticks is not None
    clock_lease.write_lease(replace(lease, holder=replace(me, start_ticks=me.start_ticks - 1)))
    assert clock_claim.undo_stale("GPU-1") is not None
    assert unlocked == ["GPU-1"]


def test_after_a_reboot_the_lease_goes_and_the_gpu_is_not_touched(lease: Lease, unlocked: list[str]) -> None:
    clock_lease.write_lease(replace(lease, holder=replace(lease.holder, boot_id="an earlier one")))
    assert clock_claim.undo_stale("GPU-1") is not None
    assert unlocked == []
    assert clock_lease.read_lease("GPU-1") is None


def test_a_watchdog_leaves_the_lease_of_a_newer_holder_alone(lease: Lease, unlocked: list[str]) -> None:
    dead = replace(lease.holder, start_ticks=1)
    clock_lease.write_lease(replace(lease, holder=dead))
    assert clock_claim.undo_stale("GPU-1", ProcessId(1, 2, dead.boot_id)) is None
    assert unlocked == []


def test_a_failing_repair_keeps_the_lease_and_warns(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(gpu_uuid: str, found: dict[str, int | None]) -> None:
        raise DeviceError(f"You may not unlock {gpu_uuid}.")

    monkeypatch.setattr(nvml, "unlock_graphics_clock", refuse)
    clock_lease.write_lease(replace(lease, holder=replace(lease.holder, start_ticks=1)))
    clock_claim.repair_at_start("GPU-1")
    assert "You may not unlock GPU-1." in caplog.text
    assert clock_lease.read_lease("GPU-1") is not None


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', '{"version": 1, "holder": {}}', "{"])
def test_damaged_leases_are_refused_with_advice(lease: Lease, content: str) -> None:
    clock_lease.lease_path("GPU-1").write_text(content)
    with pytest.raises(DeviceError, match=r"GPU-1\.json cannot be read: .*nvidia-smi --reset-gpu-clocks"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    assert clock_lease.read_leases() == []


def test_a_link_in_a_shared_folder_is_not_followed(lease: Lease, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    clock_lease.lease_path("GPU-1").with_suffix(".tmp").symlink_to(mine)
    clock_lease.write_lease(lease)
    assert mine.read_text() == "precious"
    assert clock_lease.read_lease("GPU-1") == lease
    clock_lease.lease_path("GPU-1").with_suffix(".lock").symlink_to(mine)
    with pytest.raises(DeviceError, match=r"GPU-1\.lock: .*Too many levels of symbolic links"), exclusive("GPU-1"):
        pass


def test_another_user_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has laid into /tmp for us to find."""
    monkeypatch.delenv(clock_lease.DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # /run is not ours
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lightning-pfo").symlink_to(tmp_path / "elsewhere")
    assert clock_lease.runtime_dir() == tmp_path / "lightning-pfo"  # our own link
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(DeviceError, match=r"must belong to this user; .*/lightning-pfo belongs to user number \d+\."):
        clock_lease.runtime_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act for two users")
def test_another_user_is_told_who_holds_a_gpu_in_a_shared_folder(fake_driver: FakeDriver) -> None:
    script = """
import os
from lightning_pfo.device import open_gpu
from lightning_pfo.core.errors import DeviceError
os.umask(0o077)
gpu = open_gpu("nvml", 0)
gpu.lock_graphics_clock(1200)
if os.fork() == 0:
    os.setuid(65534)
    try:
        other = open_gpu("nvml", 0)
        other.claim_clocks()
    except DeviceError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
gpu.close()
"""
    with tempfile.TemporaryDirectory() as shared:  # not pytest's, which nobody else may enter
        Path(shared).chmod(0o777)
        done = run(fake_driver.environment() | {clock_lease.DIRECTORY_VARIABLE: shared}, script)
    assert "(GPU-00000000-fake) are held by process" in done.stdout, done.stderr
    assert done.stderr == ""
    assert fake_driver.locked_gpus() == {}


def test_an_unusable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(clock_lease.DIRECTORY_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(DeviceError, match=r"file/folder cannot be made: .* Set LIGHTNING_PFO_RUNTIME_DIR"):
        clock_lease.runtime_dir()


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(clock_lease.DIRECTORY_VARIABLE, "/sys")  # where not even root can write
    with pytest.raises(DeviceError, match=r"/sys/GPU-1\.lock: .* Set LIGHTNING_PFO_RUNTIME_DIR to a folder on this"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})


def test_a_full_folder_is_named_and_nothing_is_left_running(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeviceError, match=r"GPU-1\.json cannot be written: .*No space left.* Set LIGHTNING_PFO"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    assert clock_lease.read_leases() == []
    assert not clock_lease._is_watched("GPU-1")


def test_a_relative_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra may change the present folder between a change and its undoing."""
    monkeypatch.setenv(clock_lease.DIRECTORY_VARIABLE, "leases")
    with pytest.raises(DeviceError, match=r"is an absolute path.*; got 'leases'\. Use '/.*/leases'\."):
        clock_lease.runtime_dir()


@pytest.fixture
def claim(lease: Lease) -> Iterator[ClockClaim]:
    claim = clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    yield claim
    claim._watchdog.kill()
    claim._watchdog.communicate()


def test_a_lost_lease_is_written_again_and_another_job_s_is_left_alone(claim: ClockClaim, lease: Lease) -> None:
    claim.note_change()
    clock_lease.delete_lease("GPU-1")  # a cleaner of temporary files, or restore-clocks force=true
    assert not claim.is_taken
    claim.note_change()
    assert clock_lease.read_lease("GPU-1") == replace(lease, found={})

    others = replace(lease, holder=replace(lease.holder, pid=1))
    clock_lease.write_lease(others)
    with pytest.raises(DeviceError, match="restored by force, and another job has claimed them since"):
        claim.note_change()
    assert claim.is_taken
    claim.release()
    assert clock_lease.read_lease("GPU-1") == others


def test_without_its_watchdog_no_clock_is_changed(claim: ClockClaim) -> None:
    claim._watchdog.kill()
    claim._watchdog.wait()
    with pytest.raises(DeviceError, match=r"that of Some GPU has ended \(code -9\)\. Start the job again"):
        claim.note_change()
    assert not claim.is_changed


def test_a_holder_in_another_container_lives_as_long_as_its_watchdog(
    claim: ClockClaim, lease: Lease, unlocked: list[str]
) -> None:
    elsewhere = replace(lease, holder=replace(lease.holder, pid=4_000_000, namespace="pid:[1]"))
    clock_lease.write_lease(elsewhere)
    assert clock_claim.undo_stale("GPU-1") is None
    with pytest.raises(DeviceError, match="held by process 4000000, a job in another container"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    claim._watchdog.kill()
    claim._watchdog.wait()
    assert clock_claim.undo_stale("GPU-1") == elsewhere
    assert unlocked == ["GPU-1"]


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    _, start_ticks = process_id._state_and_start(process.pid)
    holder = ProcessId(process.pid, start_ticks, process_id.boot_id())
    wait_until(lambda: process_id._state_and_start(process.pid)[0] == "Z")
    assert not holder.is_alive()
    process.wait()
    assert not holder.is_alive()


def test_the_watchdog_imports_nothing_heavy() -> None:
    heavy = {"torch", "lightning", "omegaconf", "numpy", "pandas", "hydra", "pynvml"}
    script = f"import sys, lightning_pfo.device.safety.watchdog; print(sorted({heavy} & set(sys.modules)))"
    done = run(dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[3])}, script)
    assert done.stdout == "[]\n", done.stderr


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
    assert "no lease of a GPU GPU-1..." in restore_clocks(fake_driver.environment(), "gpu=GPU-1").stdout
    assert fake_driver.locked_gpus().keys() == {0}
    restored = restore_clocks(fake_driver.environment(), "gpu=GPU-0")
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
