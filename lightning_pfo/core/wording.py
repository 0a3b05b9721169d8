"""Numbers and names in sentences."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Iterable, Sequence

_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = _BRIEF.maxset = _BRIEF.maxfrozenset = _BRIEF.maxarray = 8
_BRIEF.maxlevel = 3
_MOST_CHARACTERS = 240
LONGEST_MESSAGE = 3000
"""Characters of a whole message: a screenful."""


def shortened(value: object) -> str:
    """A value that was received as a message repeats it: as Python writes it, at most 240 characters on one line.

    Never fails, whatever the value: a number of more digits than Python writes is named by its type.
    """
    try:
        text = _BRIEF.repr(value)
    except Exception:  # a __repr__ may raise anything
        text = f"<{type(value).__name__}>"
    return cut(text.replace("\n", "\\n"))


def cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    """A text without its middle if it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - most // 3 - 5]} ... {text[-(most // 3) :]}"


def listed(names: Sequence[object], most: int = 8) -> str:
    """Such as `a, b, c`, or `a, b, ... (100,000 in all)` where there are more than `most`; each of them cut."""
    shown = ", ".join(cut(str(name), 60) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, ... ({len(names):,} in all)"


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
