import os
import stat
import subprocess
import sys

import pytest

from lightning_pfo.core import files
from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import atomic_path, write_text_atomically


def test_a_file_appears_whole_with_ordinary_permissions(tmp_path):
    target = tmp_path / "new" / "profile.csv"
    write_text_atomically(target, "a,b\n")
    assert target.read_text() == "a,b\n"
    assert stat.S_IMODE(target.stat().st_mode) & stat.S_IRUSR
    other = tmp_path / "plain"
    other.write_text("")
    assert target.stat().st_mode == other.stat().st_mode
    assert list(target.parent.iterdir()) == [target]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    target = tmp_path / "profile.csv"
    target.write_text("old")

    def write_half():
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_the_temporary_name_keeps_the_suffix(tmp_path):
    with atomic_path(tmp_path / "picture.png") as temporary:
        assert temporary.suffix == ".png"
        assert temporary.parent == tmp_path


def written(path, text):
    """A file, or a folder with a file, that holds `text`."""
    if path.suffix == ".file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / "part").write_text(text)
    return path


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("new_kind", ["file", "folder"])
@pytest.mark.parametrize("old_kind", ["file", "folder", None])
def test_files_and_folders_replace_each_other(tmp_path, monkeypatch, can_exchange, new_kind, old_kind):
    if not can_exchange:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    target = tmp_path / "last.ckpt"
    if old_kind is not None:
        written(tmp_path / f"old.{old_kind}", "old").rename(target)
    new = written(tmp_path / f"new.{new_kind}", "new")
    files.move_into_place(new, target)
    assert (target / "part" if new_kind == "folder" else target).read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_temporary_sibling_cannot_be_taken_for_the_file(tmp_path):
    temporary = files.temporary_sibling(tmp_path / "hpc_ckpt_1.ckpt")
    assert temporary.parent == tmp_path
    assert "ckpt" not in temporary.name
    assert temporary != files.temporary_sibling(tmp_path / "last.ckpt")


@pytest.mark.parametrize("name", ["", "new", "new/deep"])
def test_trying_whether_a_folder_can_be_written_leaves_nothing(tmp_path, name):
    files.check_can_write("output_dir", tmp_path / name, is_folder=True)
    files.check_can_write("output", tmp_path / name / "profile.csv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "is_folder", "message"),
    [
        ("file", True, r"^output_dir is a folder that you may write to; got '.*file' \(.*File exists\). Give another"),
        ("file/new", True, r"\(.*file/new: Not a directory\)"),
        ("file/profile.csv", False, r"is a file in a folder that you may write to; got '.*\.csv' \(.*File exists\)"),
        ("folder", False, r"\(it is a folder\)"),
        ("/proc/new", True, r"\(/proc/new: "),
        ("a\0b", True, r"\(it holds a NUL character\)"),
        ("a\0b", False, r"\(it holds a NUL character\)"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, path, is_folder, message):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=message):
        files.check_can_write("output_dir", tmp_path / path, is_folder=is_folder)
    assert (tmp_path / "file").read_text() == "kept"
    assert {found.name for found in tmp_path.iterdir()} == {"file", "folder"}


def test_a_folder_where_a_file_is_to_be_is_named(tmp_path):
    (tmp_path / "frontier.json").mkdir()
    with pytest.raises(ConfigurationError, match=r"output_dir is a folder .*/frontier\.json is a folder\)"):
        files.check_can_write("output_dir", tmp_path, is_folder=True, names=["frontier.csv", "frontier.json"])


def test_a_folder_that_others_keep_closed_is_named(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may look into any
    try:
        with pytest.raises(ConfigurationError, match=r"output is a file in a folder that you may write to.*denied"):
            files.check_can_write("output", closed / "new" / "profile.csv")
    finally:
        os.seteuid(user)


def test_files_written_together_are_all_there_or_none_is(tmp_path):
    folder = tmp_path / "new" / "plans"
    files.write_texts_together(folder, {"a.py": "1", "b.json": "2"})
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"a.py": "1", "b.json": "2"}
    plain = tmp_path / "plain"
    plain.write_text("")
    assert (folder / "a.py").stat().st_mode == plain.stat().st_mode


SMALL_FILES = """
import resource, signal, sys
from pathlib import Path
from lightning_pfo.core.files import write_texts_together
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
texts = {f"{number}.py": "new" for number in range(4)}
texts[sys.argv[2]] = "x" * 5000
try:
    write_texts_together(sys.argv[1], texts)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize("number", range(4))
def test_where_one_file_has_no_room_those_of_before_are_whole(tmp_path, number):
    folder = tmp_path / "plans"
    files.write_texts_together(folder, {f"{i}.py": "old" for i in range(4)})
    command = [sys.executable, "-c", SMALL_FILES, str(folder), f"{number}.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "OSError\n"
    assert {path.name: path.read_text() for path in folder.iterdir()} == {f"{i}.py": "old" for i in range(4)}
