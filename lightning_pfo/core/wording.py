"""Numbers and names in sentences."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

_LONGEST = 3000
"""Characters of a message: a screenful."""


def shortened(text: str, longest: int = _LONGEST) -> str:
    """Leave the middle of a long text out: a message repeats what it was given, which may be a whole file."""
    if len(text) <= longest:
        return text
    head, tail = longest * 2 // 3, longest // 3  # the rule comes first, what would work last
    return f"{text[:head]} ... ({len(text) - head - tail} characters left out) ... {text[-tail:]}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Such as `1 plan` and `2 plans`; `plural` where an s does not make it."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def pipeline_size(num_stages: int, num_microbatches: int) -> str:
    """Such as `4 stages x 8 microbatches`."""
    return f"{counted(num_stages, 'stage')} x {counted(num_microbatches, 'microbatch', 'microbatches')}"


def rounded_up(value: float, digits: int) -> str:
    """A least value as text that is not below it, so that whoever follows the message succeeds."""
    scale = 10**digits
    return f"{math.ceil(value * scale) / scale:.{digits}f}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Such as ` Did you mean plan?`, to follow a sentence; empty where no known name is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
