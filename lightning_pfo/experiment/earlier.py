"""What an earlier run has left in a folder is kept when the next begins: moved into `earlier/1`, `earlier/2`, ...

Hydra writes into the folder before anybody has looked at the settings, so it is moved before that; and put back where
the run turns out to be refused.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_pfo.core.files import new_folder_for_earlier

_RESULTS = ("report.json", "profile.csv", "plans", "optimizer.json", "training", "config", "*.png", "*.html", "*.log")
"""What a run writes. The first three say that there was one."""

_log = logging.getLogger(__name__)
_until_begun: dict[Path, Path] = {}
"""Folders whose results were moved for a run that has not begun, and where they are."""


def set_aside(folder: Path, keep: str = "") -> Path | None:
    """Move the results of an earlier run out of the way, until `begun` or for good.

    Args:
        folder: Where results go.
        keep: A file that this run reads, such as the earlier profile: it is copied.

    Returns:
        Where they are now; None if there were none.
    """

    def is_kept(path: Path) -> bool:
        return bool(keep) and Path(keep).exists() and path.samefile(keep)

    if not any((folder / name).exists() and not is_kept(folder / name) for name in _RESULTS[:3]):
        return None
    place = _until_begun[folder] = new_folder_for_earlier(folder)
    for path in [path for name in _RESULTS for path in folder.glob(name)]:
        if is_kept(path):
            shutil.copy2(path, place / path.name)
        else:
            path.rename(place / path.name)
    return place


def begun() -> None:
    """Say where earlier results are: this run writes its own from now on."""
    while _until_begun:
        _log.warning("The results of an earlier run were moved to %s.", _until_begun.popitem()[1])


@contextmanager
def put_back_if_refused() -> Iterator[None]:
    """Where a run ends before it has `begun`, earlier results are where they were; what Hydra has written goes."""
    try:
        yield
    except BaseException:
        try:
            for folder, place in _until_begun.items():
                _put_back(folder, place)
            _until_begun.clear()
        except OSError:
            begun()
        raise


def _put_back(folder: Path, place: Path) -> None:
    for path in place.iterdir():
        written = folder / path.name
        if written.is_dir():
            shutil.rmtree(written)
        path.replace(written)
    place.rmdir()
    with suppress(OSError):  # there are earlier ones
        place.parent.rmdir()
