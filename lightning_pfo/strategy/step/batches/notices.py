"""What users are told of their batches, once."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)
_said: set[str] = set()
"""No cache of a function: traces clear those, and the same would be said again."""


def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one before: batches come again and again."""
    if message not in _said:
        _said.add(message)
        _log.warning(message)
