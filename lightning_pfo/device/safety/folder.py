"""Folders of leases: which ones there are, and files in them that other users cannot turn against us.

A folder may be shared by users, so it may hold anything: a link to one of our files, a FIFO that nobody writes to, a
lock that somebody holds for ever. No link is followed, nothing but regular files is opened, no lock is waited for
longer than `LOCK_TIMEOUT_S`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pfo.core.errors import DeviceError

DIRECTORY_VARIABLE = "LIGHTNING_PFO_RUNTIME_DIR"
LOCK_TIMEOUT_S = 5.0

_NAME = "lightning-pfo"
_READABLE = 0o644  # by other users who share the folder, whatever the umask: they must see who holds a GPU
_MOST_BYTES = 1 << 16
_LOOK_EVERY_S = 0.005
# a FIFO is opened at once, and then refused; Windows, which has none of these, imports this only
_SAFELY: int = sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))


def runtime_dir() -> Path:
    """The folder of leases: the same for all jobs of a user on this machine, or for all users.

    LIGHTNING_PFO_RUNTIME_DIR, if set. Else /run/lightning-pfo, which root makes for itself, or beforehand for all users
    (mode 1777); else a folder in XDG_RUNTIME_DIR or, named by the user's number, among the temporary files. Batch jobs
    inherit an XDG_RUNTIME_DIR of another machine: one that is not there, or not ours, is left out.

    Raises:
        DeviceError: If none can be made, or the one given is relative to the present folder.
    """
    given = os.environ.get(DIRECTORY_VARIABLE)
    if given and not Path(given).is_absolute():
        raise DeviceError(
            f"{DIRECTORY_VARIABLE} is an absolute path, as jobs share the folder; got {given!r}. Use "
            f"{str(Path(given).absolute())!r}."
        )
    if given:
        with explained(f"{given} cannot be made"):
            Path(given).mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(given)
    problems: list[DeviceError] = []
    for folder in _own_folders():
        try:
            return _made(folder)
        except DeviceError as error:
            problems.append(error)
    raise problems[0]


def made_again(folder: Path) -> None:
    """Make a folder of leases where somebody has removed it: the end of a login, a cleaner of temporary files.

    Raises:
        DeviceError: If it cannot be made.
    """
    if folder.is_dir():
        return
    if str(folder) == os.environ.get(DIRECTORY_VARIABLE):
        runtime_dir()
    else:
        _made(folder)


def own_dirs() -> list[Path]:
    """`runtime_dir()`, and where else this user's jobs may have left leases, in another environment."""
    first = runtime_dir()
    if os.environ.get(DIRECTORY_VARIABLE):
        return [first]
    own_run = Path(f"/run/user/{os.getuid()}/{_NAME}")
    return _distinct([first, *_own_folders(), own_run])


def all_dirs(root: Path = Path("/")) -> list[Path]:
    """The folders of all users on this machine that this one may read; for an administrator.

    Args:
        root: Where the machine's files are: another folder if they are mounted into a container.
    """
    users = [folder for folder in (root / "run" / "user").glob(f"*/{_NAME}") if _owner(folder) == folder.parent.name]
    shared = (root / "tmp", root / "var" / "tmp", Path(tempfile.gettempdir()))
    temporary = [folder for place in shared for folder in place.glob(f"{_NAME}-*")]
    private = [folder for folder in temporary if f"{_NAME}-{_owner(folder)}" == folder.name]
    return _distinct([runtime_dir(), root / "run" / _NAME, *sorted(users), *sorted(private)])


def _own_folders() -> list[Path]:
    """In the order of preference."""
    run, session = Path("/run") / _NAME, os.environ.get("XDG_RUNTIME_DIR")
    folders = [run] if os.access("/run", os.W_OK) or (_owner(run) == "0" and os.access(run, os.W_OK)) else []
    folders += [Path(session) / _NAME] if session and Path(session).is_dir() else []
    return [*folders, Path(tempfile.gettempdir()) / f"{_NAME}-{os.getuid()}"]


def _made(folder: Path) -> Path:
    """The folder, made if it was not there, ours or (if root shares it) root's."""
    with explained(f"{folder} cannot be made"):
        folder.mkdir(mode=0o700, exist_ok=True)
        owner = folder.lstat().st_uid
    if owner != os.getuid() and not (owner == 0 and folder.parent == Path("/run")):
        raise DeviceError(
            f"The folder that remembers clock changes must belong to this user; {folder} belongs to user number "
            f"{owner}. Set {DIRECTORY_VARIABLE} to a folder of your own."
        )
    return folder


def _distinct(folders: list[Path]) -> list[Path]:
    """Those that are there, each once."""
    found: dict[tuple[int, int], Path] = {}
    for folder in folders:
        try:
            state = folder.stat()
        except OSError:
            continue
        if stat.S_ISDIR(state.st_mode) and os.access(folder, os.R_OK | os.X_OK):
            found.setdefault((state.st_dev, state.st_ino), folder)
    return list(found.values())


def _owner(folder: Path) -> str:
    """The number of the user whose folder it is; empty where it is none, or a link."""
    try:
        state = folder.lstat()
    except OSError:
        return ""
    return str(state.st_uid) if stat.S_ISDIR(state.st_mode) else ""


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turn errors of the file system into the project's, saying what to do."""
    try:
        yield
    except OSError as error:
        raise DeviceError(
            f"Changing clocks needs a folder that remembers the change; {what}: {error}. "
            f"Set {DIRECTORY_VARIABLE} to a folder on this machine that you may write to."
        ) from error


def read_regular(path: Path) -> str:
    """The text of a small regular file.

    Raises:
        OSError: If there is none, or it is something else.
        ValueError: If it is not text.
    """
    with _inside(path.parent) as folder:
        descriptor = _open_regular(path.name, os.O_RDONLY, folder)
        with os.fdopen(descriptor, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise OSError(f"it has more than {_MOST_BYTES} bytes")
    return content.decode()


def write_whole(path: Path, text: str) -> None:
    """Write a file that all users may read, whole or not at all.

    Raises:
        OSError: If it cannot be written, or is another user's in a folder where they keep theirs.
    """
    half_written = path.with_name(f"{path.name}.{os.getuid()}.tmp")  # one name each: killed processes fill no folder
    remove(half_written)
    with _inside(path.parent) as folder:
        # never what another user has laid there: a file of theirs, or a link to one of ours
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(half_written.name, flags, _READABLE, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(descriptor, _READABLE)
                file.write(text)
                file.flush()
                os.fsync(descriptor)  # renamed before it is on the disk, it would be empty after a power cut
            os.replace(half_written.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            remove(half_written)
            raise


def remove(path: Path) -> None:
    """Delete a file, if it is there.

    Raises:
        OSError: If it cannot be deleted.
    """
    with contextlib.suppress(FileNotFoundError), _inside(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """A descriptor of a file to lock, made if there is none.

    Raises:
        DeviceError: If it is something else, or cannot be opened or made.
    """
    with explained(str(path)), _inside(path.parent) as folder:
        descriptor = _open_or_make(path.name, folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_or_make(name: str, folder: int) -> int:
    try:
        return _open_regular(name, os.O_RDWR, folder)  # network file systems lock only what may be written
    except PermissionError:
        return _open_regular(name, os.O_RDONLY, folder)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, _READABLE, dir_fd=folder)
    except FileExistsError:  # another process was quicker
        return _open_regular(name, os.O_RDONLY, folder)
    os.fchmod(descriptor, _READABLE)
    return descriptor


def _open_regular(name: str, flags: int, folder: int) -> int:
    descriptor = os.open(name, flags | _SAFELY, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{name} is not a regular file")
    return descriptor


@contextmanager
def _inside(folder: Path) -> Iterator[int]:
    """A descriptor of a folder, which nobody can exchange meanwhile; links to folders are followed if they are ours."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    is_own_link = folder.is_symlink() and folder.lstat().st_uid == os.getuid()
    descriptor = os.open(folder, flags if is_own_link else flags | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, *flags: str, timeout_s: float = LOCK_TIMEOUT_S) -> bool:
    """Lock a file, waiting at most so long; returns whether it is locked.

    Raises:
        OSError: If the file system has no locks.
    """
    import fcntl  # does not exist on Windows, where nothing else of this project's device layer needs it

    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_NB | sum(getattr(fcntl, flag) for flag in flags))
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOOK_EVERY_S)
