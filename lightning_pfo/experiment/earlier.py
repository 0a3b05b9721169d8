"""What an earlier run has left in a folder is kept when the next begins: moved into `earlier/1`, `earlier/2`, ..."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning_pfo.core.files import new_folder_for_earlier

_RESULTS = ("report.json", "profile.csv", "plans", "optimizer.json", "training", "config", "*.png", "*.html", "*.log")
"""What a run writes. The first three say that there was one."""


def set_aside(folder: Path, keep: str = "") -> Path | None:
    """Move the results of an earlier run out of the way.

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
    place = new_folder_for_earlier(folder)
    for path in [path for name in _RESULTS for path in folder.glob(name)]:
        if is_kept(path):
            shutil.copy2(path, place / path.name)
        else:
            path.rename(place / path.name)
    return place
