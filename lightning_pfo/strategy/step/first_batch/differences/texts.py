"""Whether texts, and other values that are no numbers, are those of one device: `[f"row{k}" for k in range(len(x))]`.

Nothing is known by which those of microbatches could be put together in another way, so that they are compared only.
What depends on the place of a sample in its batch, or on how many there are, is another in each microbatch but the
first; what rounding decides, such as which of two classes is named, in few samples.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.first_batch.differences.pairs import Pair

_FRACTION = re.compile(r"[-+]?\d+\.\d+(?:e[-+]?\d+)?|[-+]?\d+e[-+]?\d+", re.IGNORECASE)
_INDEX = re.compile(r"\[\d+\]")
_MOST_ROUNDED = 0.5  # so many of the texts of rows may be others where layers round to few bits
_LONGEST = 60
_NOTHING = object()
"""What is nowhere in a run."""


def differing_texts(
    situation: Sequence[Pair], rules: Rules, tolerance: float, *, rounds: bool, told: Collection[str] = ()
) -> dict[str, tuple[str, str]]:
    """The texts that are others by microbatches than in one piece, by more than rounding and chance.

    Args:
        situation: The same batch, run with several draws of random numbers.
        rules: What is known of values, by which microbatches are put together.
        tolerance: The relative difference of numbers that rounding explains.
        rounds: Whether layers round to few bits, so that many a sample may be taken for another.
        told: Kinds of texts that are not looked at.

    Returns:
        For each kind, which is the place of items in a list, where the first such text is and how it differs.
    """
    by_parts = [pair.parts.texts(rules) for pair in situation]
    wholes = [pair.whole.texts(rules) for pair in situation]
    of_kind: defaultdict[str, list[str]] = defaultdict(list)
    for place in dict.fromkeys(place for texts in (*wholes, *by_parts) for place in texts):
        of_kind[_INDEX.sub("[]", place)].append(place)
    found = {}
    for kind in of_kind.keys() - set(told):
        places = of_kind[kind]
        others = {}
        for place in places:
            ours, theirs = ([texts.get(place, _NOTHING) for texts in runs] for runs in (by_parts, wholes))
            is_random = any(value != each[0] for each in (ours, theirs) for value in each)
            if not is_random and not _are_alike(ours[0], theirs[0], tolerance):
                others[place] = f"{_in_words(ours[0])} instead of {_in_words(theirs[0])}"
        number = max(len(pair.parts.recorder.sizes) for pair in situation)
        few = max(min(number - 2, len(places) / number), _MOST_ROUNDED * len(places) if rounds else 0)
        if others and (len(others) > few or len(places) == 1):
            found[kind] = next(iter(others.items()))
    return found


def _are_alike(one: Any, other: Any, tolerance: float) -> bool:
    """Whether values are equal, or texts with fractions in them that rounding explains."""
    if not (isinstance(one, str) and isinstance(other, str)):
        return bool(one == other)
    if one == other:
        return True
    if _FRACTION.split(one) != _FRACTION.split(other):
        return False
    pairs = zip(_FRACTION.findall(one), _FRACTION.findall(other), strict=True)
    return all(_are_close(mine, yours, tolerance) for mine, yours in pairs)


def _are_close(one: str, other: str, tolerance: float) -> bool:
    """Whether two numbers are equal but for rounding, which may have changed the last digit that is written."""
    mine, yours = float(one), float(other)
    digits, _, exponent = one.lower().partition("e")
    last_digit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    return abs(mine - yours) <= tolerance * max(abs(mine), abs(yours)) + 1.5 * last_digit


def _in_words(value: Any) -> str:
    text = "nothing" if value is _NOTHING else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
