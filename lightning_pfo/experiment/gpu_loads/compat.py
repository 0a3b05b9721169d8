"""All that loads use of torch although it is not public; see `strategy.compat`."""

from __future__ import annotations

from typing import Any

SEEN_IN = "torch 2.6 to 2.15"
PRIVATE = {
    "torch.cuda._sleep": (
        "Nothing public keeps a stream waiting without computing, as a receive of nccl does: energy could be "
        "measured idle and busy only."
    ),
}
"""Private names, and what they are needed for."""


def spin(cycles: int) -> None:
    """Keep the present CUDA stream in a kernel that only looks at the clock, for so many of its cycles."""
    import torch  # takes seconds

    function: Any = torch.cuda._sleep
    function(cycles)
