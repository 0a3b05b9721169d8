"""Errors that a rank raises because of another one, and which errors are so."""

from __future__ import annotations

import re

from lightning_pfo.core.errors import PfoError

_OF_TRANSFERS = re.compile(r"gloo|nccl|connection|process ?group", re.IGNORECASE)
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


class RankDiedError(PfoError, RuntimeError):
    """Another process of the run is gone, so the run cannot go on."""


def text_of(error: BaseException) -> str:
    """What others are told of an error: the same by ranks that have raised the same."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")  # Ctrl-C has no text
    return _ADDRESS.sub("0x...", text)[:2000]


def tells_of_others(error: BaseException) -> bool:
    """Whether an error is that of a transfer, which may have failed because another rank is gone."""
    return isinstance(error, RuntimeError) and bool(_OF_TRANSFERS.search(str(error)))
