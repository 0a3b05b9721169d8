"""The folders of configuration files, whoever runs this wherever."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from lightning_pfo.core.paths import conf_dir, conf_dirs, user_conf_dir


def test_a_users_folder_counts_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert conf_dirs() == [conf_dir()]
    user_conf_dir().mkdir(parents=True)
    assert conf_dirs() == [conf_dir(), tmp_path / "lightning-pfo" / "conf"]


def test_other_paths_than_absolute_ones_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_conf_dir() == tmp_path / ".config" / "lightning-pfo" / "conf"


def test_who_has_no_home_has_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert conf_dirs() == [conf_dir()]
