"""The schedules by name: which function makes the orders, and how many stages a rank runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Orders
from lightning_pfo.core.schedules.envpipe import envpipe_orders
from lightning_pfo.core.schedules.interleaved import (
    interleaved_1f1b_orders,
    interleaved_zero_bubble_orders,
    looped_bfs_orders,
)
from lightning_pfo.core.schedules.one_stage_per_rank import gpipe_orders, one_f_one_b_orders
from lightning_pfo.core.schedules.v_shaped import dualpipev_orders, zbv_orders


@dataclass(frozen=True)
class ScheduleFamily:
    """How to make the schedules of one name.

    Attributes:
        make: Maps (num_ranks, num_microbatches, stages_per_rank) to orders.
        stages_per_rank: How many stages a rank runs unless told otherwise.
        fixed: Whether it cannot be told otherwise.
    """

    make: Callable[[int, int, int], Orders]
    stages_per_rank: int = 1
    fixed: bool = True


SCHEDULES: dict[str, ScheduleFamily] = {
    "1f1b": ScheduleFamily(lambda ranks, microbatches, _: one_f_one_b_orders(ranks, microbatches)),
    "gpipe": ScheduleFamily(lambda ranks, microbatches, _: gpipe_orders(ranks, microbatches)),
    "interleaved_1f1b": ScheduleFamily(interleaved_1f1b_orders, stages_per_rank=2, fixed=False),
    "looped_bfs": ScheduleFamily(looped_bfs_orders, stages_per_rank=2, fixed=False),
    "interleaved_zero_bubble": ScheduleFamily(interleaved_zero_bubble_orders, stages_per_rank=2, fixed=False),
    "zbv": ScheduleFamily(lambda ranks, microbatches, _: zbv_orders(ranks, microbatches), stages_per_rank=2),
    "dualpipev": ScheduleFamily(lambda ranks, microbatches, _: dualpipev_orders(ranks, microbatches), 2),
    "envpipe": ScheduleFamily(lambda ranks, microbatches, _: envpipe_orders(ranks, microbatches)),
}
"""Known schedules by name; besides, `envpipe:...` takes an argument and `file:PATH` reads an order."""


def check_schedule_name(name: str) -> None:
    """Check that a schedule of this name exists, before any number is known; a file is not opened.

    Raises:
        ConfigurationError: If there is none.
    """
    if file_of(name) is None and name not in SCHEDULES and not name.startswith("envpipe:"):
        raise ConfigurationError(
            f"Unknown schedule {name!r}; known schedules: {', '.join(sorted(SCHEDULES))}, envpipe:K,K,...,0, and "
            "file:PATH for an order of your own."
        )


def file_of(name: str) -> Path | None:
    """The file that a schedule name points to: after `file:`, or the name itself if it looks like a path."""
    if name.startswith("file:"):
        return Path(name.removeprefix("file:"))
    return Path(name) if "/" in name or name.endswith((".txt", ".csv")) else None


def stages_per_rank_of(name: str, wanted: int | None = None) -> int:
    """How many stages a rank runs: `wanted` where the schedule `name` leaves it open.

    Raises:
        ConfigurationError: If `wanted` is not positive or does not suit the schedule.
    """
    family = SCHEDULES[name.partition(":")[0]]
    if wanted is None:
        return family.stages_per_rank
    if wanted < 1 or (family.fixed and wanted != family.stages_per_rank):
        flexible = ", ".join(sorted(known for known, other in SCHEDULES.items() if not other.fixed))
        raise ConfigurationError(
            f"Schedule {name!r} runs {family.stages_per_rank}{'' if family.fixed else ' or any other number of'} "
            f"stage(s) per rank; got stages_per_rank={wanted}. Leave it out, or use {flexible} with 1 or more."
        )
    return wanted


def make_orders(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """The orders of a known schedule, `envpipe:ARGUMENT` included.

    Raises:
        ConfigurationError: If the numbers do not suit the schedule.
    """
    family, _, argument = name.partition(":")
    if argument:
        return envpipe_orders(num_ranks, num_microbatches, argument)
    return SCHEDULES[family].make(num_ranks, num_microbatches, stages_per_rank)
