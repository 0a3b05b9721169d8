"""From a name to a schedule: which function makes the orders, how many stages a rank runs, and orders from files."""

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
from lightning_pfo.core.schedules.order_file import read_orders
from lightning_pfo.core.schedules.schedule import PipelineSchedule
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

KNOWN_NAMES = f"{', '.join(sorted(SCHEDULES))}, envpipe:K,K,...,0, and file:PATH for an order of your own"
"""All of these, for messages."""


def check_schedule_name(name: str) -> None:
    """Check that a schedule of this name exists, before any number is known; a file is not opened.

    Raises:
        ConfigurationError: If there is none.
    """
    is_text = isinstance(name, str)  # a setting may be anything
    if not is_text or (file_of(name) is None and name not in SCHEDULES and not name.startswith("envpipe:")):
        raise ConfigurationError(f"Unknown schedule {name!r}; known schedules: {KNOWN_NAMES}.")


def file_of(name: str) -> Path | None:
    """The file that a schedule name points to: after `file:`, or the name itself if it looks like a path."""
    if name.startswith("file:"):
        return Path(name.removeprefix("file:"))
    return Path(name) if "/" in name or name.endswith((".txt", ".csv")) else None


def make_schedule(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> PipelineSchedule:
    """Build a schedule by name and check it.

    Args:
        name: A key of `SCHEDULES`; `envpipe:ARGUMENT` (see `envpipe_orders`); or `file:PATH`, or a path that ends in
            .txt or .csv or contains a slash, for an order of your own.
        num_ranks: Number of ranks, that is GPUs of one pipeline.
        num_microbatches: Number of microbatches per iteration.
        stages_per_rank: Number of stages each rank runs; None for what is usual: 2 for the interleaved, looped and
            V-shaped schedules, 1 for the others, and what a file has.

    Raises:
        ConfigurationError: If the name is unknown, or a number is not positive or does not suit the schedule.
    """
    check_schedule_name(name)
    if num_ranks < 1 or num_microbatches < 1:
        raise ConfigurationError(
            "num_ranks (num_stages / stages_per_rank) and num_microbatches must be at least 1; "
            f"got {num_ranks} and {num_microbatches}."
        )
    path = file_of(name)
    if path is not None:
        schedule = load_schedule(path)
        schedule.check_numbers(num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
        return schedule
    per_rank = _stages_per_rank(name, stages_per_rank)
    orders = _make_orders(name, num_ranks, num_microbatches, per_rank)
    schedule = PipelineSchedule(name, num_ranks * per_rank, num_microbatches, orders)
    schedule.validate()
    return schedule


def num_ranks_for(name: str, num_stages: int, stages_per_rank: int | None = None) -> int:
    """How many ranks run `num_stages` stages under the schedule `name`: what `make_schedule` then takes.

    Raises:
        ConfigurationError: If the name is unknown, or the stages do not divide into ranks.
    """
    check_schedule_name(name)
    path = file_of(name)
    if path is not None:
        schedule = load_schedule(path)
        schedule.check_numbers(stages_per_rank=stages_per_rank)
        return schedule.num_ranks
    per_rank = _stages_per_rank(name, stages_per_rank)
    if num_stages % per_rank:
        raise ConfigurationError(
            f"Schedule {name!r} runs {per_rank} stages per rank; {num_stages} stages do not divide by {per_rank}. "
            f"Use {num_stages // per_rank * per_rank or per_rank} stages."
        )
    return num_stages // per_rank


def load_schedule(path: str | Path) -> PipelineSchedule:
    """Read an order of your own from a file (see `core.schedules.order_file`) and check it.

    Raises:
        ConfigurationError: If the file cannot be read or the order is incomplete or deadlocks.
    """
    orders = read_orders(Path(path))
    num_stages = 1 + max((inst.stage for order in orders for inst in order), default=0)
    num_microbatches = 1 + max((inst.microbatch for order in orders for inst in order), default=0)
    schedule = PipelineSchedule(f"file:{path}", num_stages, num_microbatches, orders)
    schedule.validate()
    return schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> PipelineSchedule:
    """1F1B: stage s runs `num_stages - s` warm-up forwards, then B and F in turn (Narayanan et al., SOSP 2019).

    Raises:
        ConfigurationError: If there are fewer microbatches than stages.
    """
    return PipelineSchedule("1f1b", num_stages, num_microbatches, one_f_one_b_orders(num_stages, num_microbatches))


def _stages_per_rank(name: str, wanted: int | None = None) -> int:
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


def _make_orders(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """The orders of a known schedule, `envpipe:ARGUMENT` included.

    Raises:
        ConfigurationError: If the numbers do not suit the schedule.
    """
    family, _, argument = name.partition(":")
    if argument:
        return envpipe_orders(num_ranks, num_microbatches, argument)
    return SCHEDULES[family].make(num_ranks, num_microbatches, stages_per_rank)
