"""One process at a time sets a GPU's clocks, and what a dead one left is undone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.safety import claim as clock_claim
from lightning_pfo.device.safety.claim import ClockClaim
from lightning_pfo.device.safety.lease import (
    DIRECTORY_VARIABLE,
    Lease,
    delete_lease,
    is_watched,
    read_lease,
    read_leases,
    write_lease,
)
from lightning_pfo.device.safety.process_id import ProcessId
from tests.device.fake_driver import FakeDriver, fake_driver
from tests.device.processes import kill_with_watchdog, run, start

__all__ = ["fake_driver"]


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
        done = run(fake_driver.environment() | {DIRECTORY_VARIABLE: shared}, script)
    assert "(GPU-00000000-fake) are held by process" in done.stdout, done.stderr
    assert done.stderr == ""
    assert fake_driver.locked_gpus() == {}


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(nvml, "unlock_graphics_clock", lambda uuid, found: calls.append(uuid))
    return calls


def test_a_lease_of_a_living_process_is_left_alone(lease: Lease, unlocked: list[str]) -> None:
    write_lease(lease)
    assert clock_claim.undo_stale("GPU-1") is None
    assert clock_claim.undo_stale("GPU-1", even_alive=True) == lease
    assert unlocked == ["GPU-1"]
    assert read_lease("GPU-1") is None


def test_a_reused_process_number_is_not_taken_for_the_holder(lease: Lease, unlocked: list[str]) -> None:
    me = lease.holder
    assert me.start_ticks is not None
    write_lease(replace(lease, holder=replace(me, start_ticks=me.start_ticks - 1)))
    assert clock_claim.undo_stale("GPU-1") is not None
    assert unlocked == ["GPU-1"]


def test_after_a_reboot_the_lease_goes_and_the_gpu_is_not_touched(lease: Lease, unlocked: list[str]) -> None:
    write_lease(replace(lease, holder=replace(lease.holder, boot_id="an earlier one")))
    assert clock_claim.undo_stale("GPU-1") is not None
    assert unlocked == []
    assert read_lease("GPU-1") is None


def test_a_watchdog_leaves_the_lease_of_a_newer_holder_alone(lease: Lease, unlocked: list[str]) -> None:
    dead = replace(lease.holder, start_ticks=1)
    write_lease(replace(lease, holder=dead))
    assert clock_claim.undo_stale("GPU-1", ProcessId(1, 2, dead.boot_id)) is None
    assert unlocked == []


def test_a_failing_repair_keeps_the_lease_and_warns(
    lease: Lease, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(gpu_uuid: str, found: dict[str, int | None]) -> None:
        raise DeviceError(f"You may not unlock {gpu_uuid}.")

    monkeypatch.setattr(nvml, "unlock_graphics_clock", refuse)
    write_lease(replace(lease, holder=replace(lease.holder, start_ticks=1)))
    clock_claim.repair_at_start("GPU-1")
    assert "You may not unlock GPU-1." in caplog.text
    assert read_lease("GPU-1") is not None


def test_a_folder_that_cannot_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, "/sys")  # where not even root can write
    with pytest.raises(DeviceError, match=r"/sys/GPU-1\.lock: .* Set LIGHTNING_PFO_RUNTIME_DIR to a folder on this"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})


def test_a_full_folder_is_named_and_nothing_is_left_running(lease: Lease, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DeviceError, match=r"GPU-1\.json cannot be written: .*No space left.* Set LIGHTNING_PFO"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    assert read_leases() == []
    assert not is_watched("GPU-1")


@pytest.fixture
def claim(lease: Lease) -> Iterator[ClockClaim]:
    claim = clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    yield claim
    claim._watchdog.kill()
    claim._watchdog.communicate()


def test_a_lost_lease_is_written_again_and_another_job_s_is_left_alone(claim: ClockClaim, lease: Lease) -> None:
    claim.note_change()
    delete_lease("GPU-1")  # a cleaner of temporary files, or restore-clocks force=true
    assert not claim.is_taken
    claim.note_change()
    assert read_lease("GPU-1") == replace(lease, found={})

    others = replace(lease, holder=replace(lease.holder, pid=1))
    write_lease(others)
    with pytest.raises(DeviceError, match="restored by force, and another job has claimed them since"):
        claim.note_change()
    assert claim.is_taken
    claim.release()
    assert read_lease("GPU-1") == others


def test_a_removed_folder_is_made_again_with_the_lease_and_what_others_see(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "leases"
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(folder))
    claim = clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    claim.note_change()
    shutil.rmtree(folder.parent)
    claim.check()
    assert read_lease("GPU-1") == claim._lease
    assert is_watched("GPU-1")  # for those in other containers
    claim.release()
    assert read_lease("GPU-1") is None
    assert not is_watched("GPU-1")


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
    write_lease(elsewhere)
    assert clock_claim.undo_stale("GPU-1") is None
    with pytest.raises(DeviceError, match="held by process 4000000, a job in another container"):
        clock_claim.acquire("GPU-1", "Some GPU", "nvml", {})
    claim._watchdog.kill()
    claim._watchdog.wait()
    assert clock_claim.undo_stale("GPU-1") == elsewhere
    assert unlocked == ["GPU-1"]
