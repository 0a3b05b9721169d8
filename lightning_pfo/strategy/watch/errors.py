"""Errors that a rank raises because of another one, and which errors are so."""

from __future__ import annotations

import re

from lightning_pfo.core.errors import PfoError

_OF_TRANSFERS = re.compile(r"gloo|nccl|connection|process ?group", re.IGNORECASE)


class RankDiedError(PfoError, RuntimeError):
    """Another process of the run is gone, so the run cannot go on."""


def text_of(error: BaseException) -> str:
    """What others are told of an error."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")[:2000]  # Ctrl-C has no text


def tells_of_others(error: BaseException) -> bool:
    """Whether an error is that of a transfer, which may have failed because another rank is gone."""
    return isinstance(error, RuntimeError) and bool(_OF_TRANSFERS.search(str(error)))
