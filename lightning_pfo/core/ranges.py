"""What numbers may be: the ranges of settings and of physical quantities, and how a value is told to be a number.

Truth values, texts and bytes are no numbers, although Python can make numbers of them: `True` watts is a mistake.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Set, Sized
from contextlib import suppress
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import shortened


@dataclass(frozen=True)
class Quantity:
    """What a measured or planned quantity may be.

    The ranges are wide enough for every machine and so narrow that sums, products and slopes of such numbers neither
    overflow nor vanish: whatever is outside has another unit, or is no measurement.

    Attributes:
        rule: What it is, in words, e.g. `a positive number of seconds`.
        unit: Its unit.
        least: Smallest value.
        most: Largest value.
        is_whole: Whether it is a whole number.
    """

    rule: str
    unit: str
    least: float
    most: float
    is_whole: bool = False

    def __str__(self) -> str:
        """The rule, and its range where it has one."""
        if self.most == sys.float_info.max:
            return self.rule
        least, most = (f"{bound:,}" if self.is_whole else f"{bound:g}" for bound in (self.least, self.most))
        return f"{self.rule} ({least} to {most}{self.unit and ' ' + self.unit})"

    def allows(self, value: Any) -> bool:
        """Whether a value is a number of this range."""
        is_right_kind = isinstance(value, Integral) if self.is_whole else isinstance(value, Real)
        # An integer of any size can be compared with a float, but not be made one.
        return is_right_kind and not isinstance(value, bool) and self.least <= value <= self.most

    def column(self, name: str, values: object) -> tuple[float, ...]:
        """The values of a sequence as floats (ints where whole).

        Args:
            name: What they are called, for the message.
            values: Any sequence of numbers; arrays too.

        Raises:
            ConfigurationError: If it is no sequence, or a value is not of this range.
        """
        given = items(name, values)
        for row, value in enumerate(given):
            if not self.allows(value):
                raise ConfigurationError(f"Each of {name} must be {self}; number {row} is {shortened(value)}.")
        return tuple(map(int if self.is_whole else float, given))


CLOCK = Quantity("a clock in whole MHz", "MHz", 1, 100_000, is_whole=True)
TIME = Quantity("a positive number of seconds", "s", 1e-9, 1e6)
ENERGY = Quantity("a number of joules, at least 0", "J", 0.0, 1e9)
TRANSFER = Quantity("a number of seconds, at least 0", "s", 0.0, 1e6)
LATENCY = Quantity("a number of seconds, at least 0 and at most 60", "s", 0.0, 60.0)
POWER = Quantity("a finite power in watts, at least 0", "W", 0.0, 1e9)

ERROR = Quantity("a finite standard error, at least 0", "", 0.0, sys.float_info.max)
"""Quantities of profiles and plans. A standard error is a weight beside others, so any size will do."""

NUM_PLANS = Quantity("a number of plans", "", 2, 10_000, is_whole=True)
"""More plans than one can tell apart take memory and time without end."""


def items(name: str, values: Any) -> tuple[Any, ...]:
    """The items of a sequence.

    Raises:
        ConfigurationError: If it is none: a number, a text, a mapping, a set.
    """
    is_sequence = isinstance(values, Iterable) and isinstance(values, Sized)
    if is_sequence and not isinstance(values, (str, bytes, bytearray, Mapping, Set)):
        with suppress(TypeError):  # an array of no dimension has no items
            return tuple(values)
    raise ConfigurationError(f"{name} must be a list or tuple; got {shortened(values)}.")


def is_number(value: object) -> bool:
    """Whether a value is a real number, and neither a truth value nor text."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_between(name: str, value: Any, low: float, high: float = math.inf) -> None:
    """Check that a finite number is at least `low` and at most `high`.

    Raises:
        ConfigurationError: If it is not, or no number at all.
    """
    if not is_number(value) or not (low <= value <= high and -math.inf < value < math.inf):
        allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ConfigurationError(f"{name} is {allowed}; got {shortened(value)}.")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """Check that a whole number is at least `low` and at most `high`.

    Raises:
        ConfigurationError: If it is not, or no whole number at all.
    """
    if not Quantity("", "", low, high, is_whole=True).allows(value):
        raise ConfigurationError(f"{name} is a whole number between {low:,} and {high:,}; got {shortened(value)}.")


def check_above(name: str, value: Any, low: float) -> None:
    """Check that a finite number is above `low`.

    Raises:
        ConfigurationError: If it is not, or no number at all.
    """
    if not is_number(value) or not low < value < math.inf:
        raise ConfigurationError(f"{name} is above {low}; got {shortened(value)}.")


def check_counts(**counts: Any) -> None:
    """Check options that count something, where None leaves the number to the library.

    Args:
        counts: Their values, by name.

    Raises:
        ConfigurationError: If one is no whole number, or less than 1.
    """
    for name, value in counts.items():
        if value is not None and not _COUNT.allows(value):
            raise ConfigurationError(f"{name} is {_COUNT.rule}, or None; got {shortened(value)}.")


def check_switches(**switches: Any) -> None:
    """Check options that are switched on or off: `check_loss="no"` would be on.

    Args:
        switches: Their values, by name.

    Raises:
        ConfigurationError: If one is neither true nor false.
    """
    for name, value in switches.items():
        if not isinstance(value, Integral) or value not in (0, 1):
            raise ConfigurationError(f"{name} is True or False; got {shortened(value)}.")


_COUNT = Quantity("a whole number, at least 1", "", 1, sys.float_info.max, is_whole=True)
