"""Which functions of torch draw random numbers, by what torch says of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def draws(function: Any) -> bool:
    """Whether a function of torch draws random numbers; false of what is no operation of its own."""
    packet: Any = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
    overloads = packet.overloads() if hasattr(packet, "overloads") else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, name).tags for name in overloads)
