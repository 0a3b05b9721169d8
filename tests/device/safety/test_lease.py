"""Files that say which process has changed which GPU, and where they lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_pfo.core.errors import DeviceError
from lightning_pfo.device.safety.claim import acquire
from lightning_pfo.device.safety.lease import (
    DIRECTORY_VARIABLE,
    Lease,
    exclusive,
    lease_path,
    read_lease,
    read_leases,
    runtime_dir,
    write_lease,
)


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
    lease_path("GPU-1").with_suffix(".tmp").symlink_to(mine)
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
