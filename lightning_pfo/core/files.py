"""Writing files so that a reader never sees half of one."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_pfo.core.errors import ConfigurationError

log = logging.getLogger(__name__)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path` that replaces it if the block succeeds and vanishes if it fails.

    The temporary name keeps the suffix of `path`, because writers such as matplotlib choose the format by it.
    Missing parent directories are made.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=target.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def write_text_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` (UTF-8) to `path`, whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


class PatientFiles:
    """Files of a training that are written as soon as they can be: a disk that is full does not end it.

    What cannot be written is told once for each file, and tried again with the next one and by `try_again`.
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, Callable[[], object]] = {}
        self._told: set[Path] = set()

    @property
    def are_written(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def write(self, path: Path, write: Callable[[], object]) -> None:
        """Write a file or folder now, or later; what waits to be written there is replaced.

        Args:
            path: What it is.
            write: Writes it, whole or not at all.
        """
        self._waiting[path] = write
        self.try_again()

    def try_again(self) -> None:
        """Write what waits."""
        for path, write in list(self._waiting.items()):
            try:
                write()
            except OSError as error:
                if path not in self._told:
                    log.warning(
                        "%s cannot be written (%s). Training goes on, and it is tried again until the end.", path, error
                    )
                self._told.add(path)
            else:
                if self._waiting.get(path) is write:  # another thread may have something newer
                    del self._waiting[path]


def new_folder_for_earlier(folder: Path) -> Path:
    """Make `earlier/1`, `earlier/2`, ... in a folder: a place for what an earlier run has left in that."""
    numbers = [int(path.name) for path in (folder / "earlier").glob("[0-9]*") if path.name.isdigit()]
    place = folder / "earlier" / str(1 + max(numbers, default=0))
    place.mkdir(parents=True)
    return place


def write_texts_together(folder: str | os.PathLike[str], texts: Mapping[str, str]) -> None:
    """Write files (UTF-8) into a folder, all of them or none: on a full disk the files of before are whole.

    They are written beside first, and renamed, in their order, when the last one is complete. Missing folders are made.

    Args:
        folder: Where they go.
        texts: Text of each file, by name.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".writing-") as beside:
        for name, text in texts.items():
            (Path(beside) / name).write_text(text, encoding="utf-8")
        for name in texts:
            (Path(beside) / name).replace(target / name)


def check_can_write(
    setting: str, path: str | os.PathLike[str], *, is_folder: bool = False, names: Sequence[str] = ()
) -> None:
    """Check that a file, or files into a folder, can be written, before the work whose result they hold.

    Only writing shows it: folders that are missing are made, and removed again.

    Args:
        setting: What the path was given as, for the message.
        path: The file or folder.
        is_folder: Whether it is a folder.
        names: Names of the files that will be written into the folder.

    Raises:
        ConfigurationError: If it cannot be written.
    """
    target = Path(path)
    folder = target if is_folder else target.parent
    reason = "it holds a NUL character" if "\0" in str(target) else _why_not_written(folder)
    if reason is None and target.is_dir() and not is_folder:
        reason = "it is a folder"
    if reason is None:
        reason = next((f"{folder / name} is a folder" for name in names if (folder / name).is_dir()), None)
    if reason is not None:
        wanted = "a folder" if is_folder else "a file in a folder"
        raise ConfigurationError(
            f"{setting} is {wanted} that you may write to; got {str(path)!r} ({reason}). Give another path."
        )


def _why_not_written(folder: Path) -> str | None:
    """Why no file can be written into a folder; None if one can."""
    missing = [one for one in (folder, *folder.parents) if not os.path.exists(one)]  # noqa: PTH110 (Path.exists may raise)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    finally:
        for one in missing:
            with suppress(OSError):
                one.rmdir()
    return None


def temporary_sibling(path: str | os.PathLike[str]) -> Path:
    """Where something large is written before it becomes `path`; the same on every process of a run.

    The name contains nothing of `path`'s, so that those who look for files by name never take it for a finished one.
    """
    target = Path(path).absolute()
    digest = hashlib.blake2b(target.name.encode(), digest_size=8).hexdigest()
    return target.with_name(f".saving-{digest}.tmp")


def move_into_place(written: Path, target: Path) -> None:
    """Make the file or folder `written` the one at `target`, in one step, and remove what was there before.

    A crash at any moment leaves the old one or the new one at `target`. Where the system cannot exchange two names at
    once, a folder that is replaced stays beside `target` until the new one is in place.
    """
    _sync(written)
    if written.is_dir() or (target.is_dir() and not target.is_symlink()):
        _move_folder_into_place(written, target)
    else:
        written.replace(target)
    _sync(target.parent)


def _move_folder_into_place(written: Path, target: Path) -> None:
    if not os.path.lexists(target):
        written.rename(target)
        return
    if _exchange(written, target):
        _remove(written)
        return
    earlier = written.with_suffix(".replaced")
    _remove(earlier)
    target.rename(earlier)
    written.rename(target)
    _remove(earlier)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically (Linux's renameat2); False where that is not possible."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_working_directory, exchange_flag = -100, 2
    names = os.fsencode(one), os.fsencode(other)
    return (
        rename is not None
        and rename(at_working_directory, names[0], at_working_directory, names[1], exchange_flag) == 0
    )


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Have a file's or folder's content written to the disk, so that a power cut after renaming finds it there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
