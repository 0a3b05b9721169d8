"""Files that say which process has changed which GPU, and where they lie."""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.backends import nvml
from lightning_pfo.device.safety import folder
from lightning_pfo.device.safety.claim import acquire, undo_stale
from lightning_pfo.device.safety.lease import (
    DIRECTORY_VARIABLE,
    Lease,
    claimed_here,
    exclusive,
    lease_path,
    read_lease,
    read_leases,
    runtime_dir,
    write_lease,
)
from lightning_pfo.device.safety.process_id import this_process


def test_leases_survive_writing_and_reading(lease: Lease) -> None:
    assert read_lease("GPU-1") is None
    write_lease(lease)
    assert read_lease("GPU-1") == lease
    assert read_leases() == [lease]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 2}', '{"version": 1, "holder": {}}', "{"])
def test_damaged_leases_are_refused_with_advice(lease: Lease, content: str) -> None:
    lease_path("GPU-1").write_text(content)
    with pytest.raises(DeviceError, match=r"GPU-1\.json cannot be read: .*nvidia-smi --reset-gpu-clocks"):
        acquire("GPU-1", "Some GPU", "nvml", {})
    assert read_leases() == []


def test_a_link_in_a_shared_folder_is_not_followed(lease: Lease, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("precious")
    lease_path("GPU-1").with_name(f"GPU-1.json.{os.getuid()}.tmp").symlink_to(mine)
    write_lease(lease)
    assert mine.read_text() == "precious"
    assert read_lease("GPU-1") == lease
    lease_path("GPU-1").with_suffix(".lock").symlink_to(mine)
    with pytest.raises(DeviceError, match=r"GPU-1\.lock: .*Too many levels of symbolic links"), exclusive("GPU-1"):
        pass


def test_another_user_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody has laid into /tmp for us to find."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # /run is not ours
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "lightning-pfo").symlink_to(tmp_path / "elsewhere")
    assert runtime_dir() == tmp_path / "lightning-pfo"  # our own link
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(DeviceError, match=r"must belong to this user; .*/lightning-pfo belongs to user number \d+\."):
        runtime_dir()


def test_an_unusable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file" / "folder"))
    with pytest.raises(DeviceError, match=r"file/folder cannot be made: .* Set LIGHTNING_PFO_RUNTIME_DIR"):
        runtime_dir()


def test_a_relative_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra may change the present folder between a change and its undoing."""
    monkeypatch.setenv(DIRECTORY_VARIABLE, "leases")
    with pytest.raises(DeviceError, match=r"is an absolute path.*; got 'leases'\. Use '/.*/leases'\."):
        runtime_dir()


@pytest.mark.parametrize("suffix", [".json", ".lock", ".watched"])
def test_a_fifo_in_a_shared_folder_hangs_nobody(lease: Lease, suffix: str) -> None:
    """Opened in the usual way, it would wait for a writer for ever."""
    os.mkfifo(lease_path("GPU-1").with_suffix(suffix))
    with pytest.raises(DeviceError, match=rf"GPU-1\{suffix}.* is not a regular file"):
        acquire("GPU-1", "Some GPU", "nvml", {})
    assert read_leases() == []


@pytest.mark.parametrize("suffix", [".lock", ".watched"])
def test_a_lock_that_a_reader_keeps_hangs_nobody(lease: Lease, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.try_lock, "__kwdefaults__", {"timeout_s": 0.02})
    path = lease_path("GPU-1").with_suffix(suffix)
    path.touch()
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        with pytest.raises(DeviceError, match=rf"GPU-1\{suffix} was for 5 s, by another process. Find it with `fuser"):
            acquire("GPU-1", "Some GPU", "nvml", {})
        dead = replace(lease, holder=replace(lease.holder, start_ticks=1, boot_id="an earlier one"))
        write_lease(dead)
        assert undo_stale("GPU-1", dead.holder, insists=True) == dead  # who restores is not kept from it


def test_a_session_folder_that_a_batch_job_has_inherited_from_another_node_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    monkeypatch.setattr(os, "access", lambda *_: False)  # /run is not ours
    monkeypatch.setattr(folder.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run" / "user" / "1000"))
    assert runtime_dir() == tmp_path / f"lightning-pfo-{os.getuid()}"
    Path(os.environ["XDG_RUNTIME_DIR"]).mkdir(parents=True)
    assert runtime_dir() == tmp_path / "run" / "user" / "1000" / "lightning-pfo"


def test_another_node_s_lease_on_a_shared_file_system_is_left_alone(
    lease: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(lease, holder=replace(lease.holder, host="node7", boot_id="node7's"))
    write_lease(elsewhere)
    assert undo_stale("GPU-1", even_alive=True) is None
    claim = acquire("GPU-1", "Some GPU", "nvml", {})  # of a GPU with this UUID here
    assert {one.holder.host for one in read_leases()} == {"node7", lease.holder.host}
    claim.release()
    assert read_leases() == [elsewhere]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act for two users")
def test_users_share_a_sticky_folder_of_root_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody may delete another's lease there: what a dead job left is undone, and stays."""
    calls: list[str] = []
    monkeypatch.setattr(nvml, "unlock_graphics_clock", lambda uuid, found: calls.append(uuid))
    with tempfile.TemporaryDirectory() as shared:  # not pytest's, which nobody else may enter
        Path(shared).chmod(0o1777)
        monkeypatch.setenv(DIRECTORY_VARIABLE, shared)
        dead = Lease("GPU-1", "Some GPU", "nvml", replace(this_process(), start_ticks=1), {}, ("graphics_clock",))
        for user in (65533, 65534):
            os.seteuid(user)
            monkeypatch.setattr(os, "getuid", lambda user=user: user)
            try:
                if user == 65533:
                    write_lease(dead)
                else:
                    assert undo_stale("GPU-1") == dead
                    claimed_here.add("GPU-1")
                    mine = replace(dead, holder=this_process(), changed=())
                    write_lease(mine)
                    assert read_lease("GPU-1") == mine
                    assert undo_stale("GPU-1") == dead
            finally:
                os.seteuid(0)
                claimed_here.discard("GPU-1")
        assert calls == ["GPU-1"]  # not again while the second user holds it
        assert len(read_leases()) == 2
