"""The default checkpoint: one file that is there whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from typing_extensions import override

from lightning_pfo.core.files import move_into_place, temporary_sibling


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint beside its place and renames it, so that a crash never costs the one before.

    Lightning's own writes a file in the temporary directory and moves it, which copies it over the earlier checkpoint
    where that is another file system. Remote paths (`s3://...`) are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        save_file(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
        if is_remote(path) or not Path(path).is_file():
            return super().load_checkpoint(path, map_location, **options)
        # each rank needs a part only: what is not touched is not read
        loaded: dict[str, Any] = torch.load(path, map_location, mmap=_is_zip(Path(path)), weights_only=weights_only)
        return loaded


def save_file(content: Any, path: Path) -> None:
    """Save with `torch.save`; whole or not at all."""
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        torch.save(content, temporary)
        move_into_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def is_remote(path: str | Path) -> bool:
    """Whether a path has a protocol, such as `s3://`."""
    return "://" in str(path)


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"
