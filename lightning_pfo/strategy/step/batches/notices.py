"""What users are told of their batches, once."""

from __future__ import annotations

import logging
from functools import cache

_log = logging.getLogger(__name__)


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one before: batches come again and again."""
    _log.warning(message)
