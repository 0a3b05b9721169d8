"""Where the project keeps its configuration files."""

from __future__ import annotations

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
            return candidate
    raise FileNotFoundError(
        f"The configuration folder is {candidates[0]} (installed) or {candidates[1]} (source checkout), but neither "
        "exists. Install lightning-pfo again, or run from a complete checkout."
    )
