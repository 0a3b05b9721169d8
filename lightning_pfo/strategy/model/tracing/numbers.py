"""What units return that is no tensor: numbers go to later stages, of other values these have what the trace has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from lightning_pfo.strategy.model.tracing.ends import DeviationError, deviates
from lightning_pfo.strategy.model.tracing.events import Event, Number, Passed

_COMPARED = (str, bytes, bool, int, float, complex, np.ndarray, np.generic)
"""Types of values that can be compared quickly, and hold all that they say."""


def number_in(number: Number, sent: Sequence[Any]) -> Any:
    """A number that a unit has returned on an earlier stage.

    Args:
        number: What is known of it.
        sent: The numbers of its event that were sent, as floats; none where nobody has sent them.
    """
    return type(number.value)(sent[number.index]) if sent else number.value


def check_same(event: Event, leaf: Any, expected: Any, leaves: Sequence[Any]) -> None:
    """Check that what a unit returns beside tensors is what other stages take it for.

    Args:
        event: The unit's call.
        leaf: What it has returned.
        expected: What it has returned in the trace.
        leaves: What it was given.

    Raises:
        DeviationError: If it is something else.
    """
    if isinstance(expected, Passed):
        expected = leaves[expected.argument]
    if isinstance(expected, Number):
        if type(leaf) is not type(expected.value):
            raise deviates()
    elif isinstance(expected, _COMPARED) and not _is_same(leaf, expected):
        names = ", ".join(repr(unit.name) for unit in event.units)
        raise DeviationError(
            f"What a layer returns beside tensors, if it depends on no value and no argument, is the same for all "
            f"batches, as other stages have it from a trace on zeros; {names} returns {type(leaf).__name__} "
            f"{leaf!r:.60} here, and {expected!r:.60} in the trace. Return a tensor."
        )


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return bool(np.array_equal(one, other, equal_nan=True)) if isinstance(one, (np.ndarray, float)) else one == other
