"""Where the project and its users keep configuration files."""

from __future__ import annotations

import os
from pathlib import Path

import lightning_pfo


def conf_dir() -> Path:
    """Return the folder of Hydra groups: packaged into the wheel, or `conf/` at the top of a source checkout.

    Raises:
        FileNotFoundError: If neither is there.
    """
    package = Path(lightning_pfo.__file__).parent
    candidates = (package / "conf", package.parent / "conf")
    for candidate in candidates:
        if candidate.is_dir():
            return candidate.resolve()  # in a checkout the first is a link to the second
    raise FileNotFoundError(
        f"The configuration folder is {candidates[0]} (installed) or {candidates[1]} (source checkout), but neither "
        "exists. Install lightning-pfo again, or run from a complete checkout."
    )


def user_conf_dir() -> Path:
    """The folder of this user's own Hydra groups, which need not be there: `~/.config/lightning-pfo/conf`."""
    return _base_dir("XDG_CONFIG_HOME", "~/.config") / "lightning-pfo" / "conf"


def user_cache_dir() -> Path:
    """The folder of what is measured once for this user, which need not be there: `~/.cache/lightning-pfo`."""
    return _base_dir("XDG_CACHE_HOME", "~/.cache") / "lightning-pfo"


def _base_dir(variable: str, otherwise: str) -> Path:
    base = os.environ.get(variable, "")
    # XDG: other paths are ignored; where nobody knows a home, as in some containers, there is no such folder
    return Path(base if os.path.isabs(base) else os.path.expanduser(otherwise))  # noqa: PTH111, PTH117


def conf_dirs() -> list[Path]:
    """The folders in which options of Hydra groups are looked for: ours, whose names keep their meaning; the user's."""
    users = user_conf_dir()
    return [conf_dir(), *([users] if os.access(users, os.R_OK | os.X_OK) and users.is_dir() else [])]
