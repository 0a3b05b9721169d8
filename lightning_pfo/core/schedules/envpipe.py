"""EnvPipe's early-forward order: 1F1B whose inner stages run k more forwards before their first backward.

The finished forwards queue up before the last stage, so that inner stages may run late (at a lower clock) without
starving it (Choi et al., EnvPipe, USENIX ATC 2023). With backward/forward ratio 2 and 4 stages x 8 microbatches,
k = (4, 4, 2, 0)::

    rank 0  F0 F1 F2 F3 F4 F5 F6 F7 B0 B1 B2 B3 B4 B5 B6 B7
    rank 1  F0 F1 F2 F3 F4 F5 F6 B0 F7 B1 B2 B3 B4 B5 B6 B7
    rank 2  F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
    rank 3  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7

Here k never is negative and never grows from stage to stage. The original allows growth where a stage runs all its
forwards first, and hangs there.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Orders
from lightning_pfo.core.schedules.one_stage_per_rank import warm_up_orders

log = logging.getLogger(__name__)

DEFAULT_RATIO = 2.0
"""Time of a backward at the top clock over the time of a forward at its slower clock."""

_OPTION = re.compile(r"(ratio|max_in_flight)=(.+)")
_HELP = (
    "Write envpipe, envpipe:K,K,...,0 with one number of extra forwards per stage, or envpipe:ratio=2,max_in_flight=8"
)


def extra_forwards(num_ranks: int, ratio: float = DEFAULT_RATIO) -> tuple[int, ...]:
    """How many slow forwards fit into the backwards of the stages behind: floor(ratio x (ranks - 1 - stage)).

    Args:
        num_ranks: Number of stages.
        ratio: Backward time at the top clock over forward time at the planned clock.
    """
    return tuple(math.floor(ratio * (num_ranks - 1 - stage)) for stage in range(num_ranks))


def clamp(extra: Sequence[int], num_microbatches: int, max_in_flight: int | None = None) -> tuple[int, ...]:
    """Bring extra forwards into the range that runs: 0 <= k, no more forwards than there are, k not growing.

    Args:
        extra: Wanted extra warm-up forwards of each stage; the last stage always gets 0.
        num_microbatches: Number of microbatches per iteration.
        max_in_flight: Most microbatches whose activations a stage may keep; None for no limit. 1F1B's own
            `stages - stage` are always kept.
    """
    num_ranks = len(extra)
    most = num_microbatches if max_in_flight is None else min(num_microbatches, max_in_flight)
    clamped: list[int] = []
    for stage, wanted in enumerate(extra):
        room = 0 if stage == num_ranks - 1 else most - (num_ranks - stage)
        clamped.append(max(0, min(wanted, room, clamped[-1] if clamped else wanted)))
    return tuple(clamped)


def envpipe_orders(num_ranks: int, num_microbatches: int, argument: str = "") -> Orders:
    """Early-forward orders for the text after `envpipe:`.

    Args:
        num_ranks: Number of stages.
        num_microbatches: Number of microbatches per iteration; may be less than `num_ranks`.
        argument: Extra forwards such as `4,4,2,0`, or `ratio=1.6`, `max_in_flight=8` or both; empty for the default
            ratio and no limit.

    Raises:
        ConfigurationError: If the argument is neither, or has another number of stages.
    """
    extra, max_in_flight = _parse(argument, num_ranks)
    clamped = clamp(extra, num_microbatches, max_in_flight)
    if clamped != extra:
        log.info("envpipe: extra forwards by stage %s, limited to %s", list(extra), list(clamped))
    warm_ups = [min(num_microbatches, num_ranks - stage + k) for stage, k in enumerate(clamped)]
    return warm_up_orders(warm_ups, num_microbatches)


def _parse(argument: str, num_ranks: int) -> tuple[tuple[int, ...], int | None]:
    words = [word.strip() for word in argument.split(",")] if argument.strip() else []
    if words and all(word.isdecimal() for word in words):
        if len(words) != num_ranks:
            raise ConfigurationError(
                f"envpipe needs one number of extra forwards for each of {num_ranks} stages; got {argument!r} "
                f"({len(words)} numbers). For example envpipe:{','.join(map(str, extra_forwards(num_ranks)))}."
            )
        return tuple(map(int, words)), None
    options: dict[str, float] = {}
    for word in words:
        match = _OPTION.fullmatch(word)
        value = _positive(match[2]) if match else None
        if match is None or value is None or match[1] in options or (match[1] != "ratio" and value != int(value)):
            raise ConfigurationError(f"{_HELP}; got {word!r} in envpipe:{argument}.")
        options[match[1]] = value
    limit = options.get("max_in_flight")
    return extra_forwards(num_ranks, options.get("ratio", DEFAULT_RATIO)), None if limit is None else int(limit)


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
