"""Numbers of a configuration and the ranges they lie in."""

from __future__ import annotations

import math

from lightning_pfo.core.errors import ConfigurationError


def check_between(name: str, value: float, low: float, high: float = math.inf) -> None:
    """Check that a finite number is at least `low` and at most `high`.

    Raises:
        ConfigurationError: If it is not.
    """
    if not (low <= value <= high and math.isfinite(value)):
        allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ConfigurationError(f"{name} is {allowed}; got {value}.")


def check_above(name: str, value: float, low: float) -> None:
    """Check that a finite number is above `low`.

    Raises:
        ConfigurationError: If it is not.
    """
    if not low < value < math.inf:
        raise ConfigurationError(f"{name} is above {low}; got {value}.")
