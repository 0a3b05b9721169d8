"""What queues of transfers cost: iterations in which ranks wait for each other's ends of transfers. Emulated.

    python benchmarks/rendezvous.py [--ranks 4] [--microbatches 8] [--stretch 1.0 1.1 1.2]

A transfer happens when both ends have come to it (a rendezvous, as with nccl), so what is behind it in a queue waits
for the slower of two ranks. The planner knows of no such waits. Here the transfers of `p2p_program` are played too,
with queues of three kinds: one for all transfers of a rank, one for each pair of ranks, and one for each direction
between two ranks, as the strategy posts them. Transfers themselves take no time. The clocks are those of plans that
take 1.0, 1.1, ... times as long as the fastest, on emulated A100s. Prints one JSON line for each schedule and plan: by
how many percent each kind of queue makes the iteration longer.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cache
from typing import Any

from pipelines import emulate

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.p2p import Receive, Transfer, p2p_program
from lightning_pfo.core.schedules.registry import SCHEDULES, make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.planner import plan_frontier

QueueOf = Callable[[Transfer], Hashable]
"""The queue that a transfer goes through, on both of its ranks."""
QUEUES: dict[str, QueueOf] = {
    "rank": lambda transfer: "all",
    "pair": lambda transfer: frozenset((transfer.source, transfer.destination)),
    "direction": lambda transfer: (transfer.source, transfer.destination),
}
INTERLEAVED = ("interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv")
STAGES = (0.95, 1.04, 0.98, 1.03, 1.0, 0.97, 1.05, 1.01)  # how long each takes; they are never equal


class Rendezvous:
    """One iteration.

    Args:
        schedule: Order of instructions.
        durations_s: Of each instruction, one row per rank.
        queue_of: Queues; what a rank posts to one of them at a time goes together.
    """

    def __init__(self, schedule: PipelineSchedule, durations_s: Sequence[Sequence[float]], queue_of: QueueOf) -> None:
        self._durations_s = {
            inst: duration_s
            for order, row in zip(schedule.orders, durations_s, strict=True)
            for inst, duration_s in zip(order, row, strict=True)
        }
        self._before: dict[Instruction, Instruction | None] = {}  # on the same rank
        self._input = {after: before for before, after in schedule.handovers().items()}
        self._arriving: dict[Instruction, tuple[Any, ...]] = {}  # with which posting
        self._postings: dict[tuple[Any, ...], list[Transfer]] = {}
        self._posting_of: dict[tuple[int, Transfer], tuple[Any, ...]] = {}
        self._ahead: dict[tuple[Any, ...], tuple[Any, ...] | None] = {}  # in the same queue
        for rank, row in enumerate(p2p_program(schedule)):
            self._lay_out(rank, row, queue_of)

    def _lay_out(self, rank: int, row: Sequence[Any], queue_of: QueueOf) -> None:
        last: Instruction | None = None
        newest: dict[Hashable, tuple[Any, ...]] = {}
        for step in row:
            if isinstance(step, Instruction):
                self._before[step], last = last, step
                continue
            queue = queue_of(step.transfer)
            posting = (rank, queue, last)
            if posting not in self._postings:
                self._postings[posting], self._ahead[posting] = [], newest.get(queue)
                newest[queue] = posting
            self._postings[posting].append(step.transfer)
            self._posting_of[rank, step.transfer] = posting
            if isinstance(step, Receive):
                self._arriving[step.transfer.consumer] = posting

    def time_s(self) -> float:
        """How long the iteration takes."""

        @cache
        def end(inst: Instruction | None) -> float:
            if inst is None:
                return 0.0
            posting = self._arriving.get(inst)
            ready = end(self._input.get(inst)) if posting is None else done(posting)
            return max(end(self._before[inst]), ready) + self._durations_s[inst]

        @cache
        def begin(posting: tuple[Any, ...]) -> float:
            ahead = self._ahead[posting]
            return max(end(posting[-1]), 0.0 if ahead is None else done(ahead))

        @cache
        def done(posting: tuple[Any, ...]) -> float:
            return max(
                begin(self._posting_of[rank, transfer])
                for transfer in self._postings[posting]
                for rank in (transfer.source, transfer.destination)
            )

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(100_000)  # as deep as the iteration is long
        try:
            return max(*map(end, self._durations_s), *map(done, self._postings))
        finally:
            sys.setrecursionlimit(limit)


def losses(name: str, num_ranks: int, num_microbatches: int, stretches: Sequence[float]) -> Iterator[dict[str, Any]]:
    """What each kind of queue costs one schedule under plans that take longer than the fastest."""
    stages_per_rank = SCHEDULES[name].stages_per_rank
    schedule = make_schedule(name, num_ranks, num_microbatches, stages_per_rank)
    profile, power_w = emulate("a100", [STAGES[stage % len(STAGES)] for stage in range(schedule.num_stages)])
    settings: dict[str, Any] = {"schedule": schedule, "p2p_blocking_power_w": power_w, "effort": "fast", "num_plans": 2}
    fastest_s = plan_frontier(profile, **settings).plans[0].iteration_time_s
    frontier = plan_frontier(profile, **settings, deadlines_s=[fastest_s * stretch for stretch in stretches])
    for stretch in stretches:
        in_time = [plan for plan in frontier.plans if plan.iteration_time_s <= fastest_s * stretch * (1 + 1e-9)]
        plan = max(in_time, key=lambda plan: plan.iteration_time_s)
        durations_s = [
            [profile.of(inst.stage, inst.type).at(clock)[0] for inst, clock in zip(order, row, strict=True)]
            for order, row in zip(schedule.orders, plan.clocks_mhz, strict=True)
        ]
        yield {
            "schedule": name,
            "stretch": stretch,
            **{
                kind: round(100 * (Rendezvous(schedule, durations_s, queue_of).time_s() / plan.iteration_time_s - 1), 2)
                for kind, queue_of in QUEUES.items()
            },
        }


def main() -> None:
    """Print what each schedule loses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--stretch", type=float, nargs="+", default=[1.0, 1.1, 1.2])
    options = parser.parse_args()
    for name in ("1f1b", *INTERLEAVED):
        for result in losses(name, options.ranks, options.microbatches, options.stretch):
            sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
