"""Checkpoint files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_pfo.core.files import move_into_place, temporary_sibling


def save_file(content: Any, path: Path) -> None:
    """Save with `torch.save`; whole or not at all."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
        move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_file(path: Path, map_location: Any, *, weights_only: bool | None) -> dict[str, Any]:
    """Load with `torch.load`; each rank needs a part only, and what is not touched is not read."""
    loaded: dict[str, Any] = torch.load(path, map_location, mmap=_is_zip(path), weights_only=weights_only)
    return loaded


def is_remote(path: str | Path) -> bool:
    """Whether a path has a protocol, such as `s3://`."""
    return "://" in str(path)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
