"""Words in the column `flags` of a profile, separated by blanks: what to doubt about a measurement."""

from collections.abc import Collection

POWER_CAP, THERMAL, HW_SLOWDOWN = "power_cap", "thermal", "hw_slowdown"
"""What held the clock down in a tenth of an instruction's time or more."""

CLOCK_NOT_REACHED = "clock_not_reached"
"""The mean clock was not the one asked for."""

CLOCK_ABOVE = "clock_above"
"""It was above it, beside `clock_not_reached`: the GPU took the request and ignored it, or somebody else has set it."""

DRIFT = "drift"
"""The top clock needed another energy or time when it was measured again, and the temperature does not explain it."""

ENERGY_UNCERTAIN = "energy_uncertain"
"""Two standard errors of the energy are more than was allowed."""

WAITING_UNCERTAIN = "waiting_uncertain"
"""Two standard errors of the energy of waiting are, as a share of all energy."""


def is_capped(flags: Collection[str]) -> bool:
    """Whether a power limit held the clock below the request."""
    return CLOCK_NOT_REACHED in flags and POWER_CAP in flags and CLOCK_ABOVE not in flags


def is_unreached(flags: Collection[str]) -> bool:
    """Whether the clock was another one, and no power limit explains it."""
    return CLOCK_NOT_REACHED in flags and not is_capped(flags)
