import stat

import pytest

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
