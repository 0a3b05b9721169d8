"""All that is used of Lightning's callbacks although it is not public; see `strategy.trainer.compat`."""

from __future__ import annotations

from typing import Any

SEEN_IN = "lightning 2.5 to 2.6"
PRIVATE = {
    "lightning.pytorch.callbacks.ThroughputMonitor._throughputs": (
        "A pipeline of four devices would be said to have four times its samples and flops per second."
    ),
    "lightning.pytorch.callbacks.StochasticWeightAveraging._average_model": (
        "Averages of weights would keep the layers of all stages on every rank."
    ),
}
"""Private names, and what they are needed for."""


def throughputs_of(callback: Any) -> list[Any]:
    """What a `ThroughputMonitor` counts with, from its `setup` on."""
    return list(callback._throughputs.values())


def average_of(callback: Any) -> Any:
    """The copy of the module in which a callback averages weights; None before it has made one."""
    return callback._average_model
