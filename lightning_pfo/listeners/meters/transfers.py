"""How long transfers between ranks take, from when instructions began and ended on both sides.

::

    rank 0   |== F0 ==|                      | B0
                      ^~~~~ transfer ~~~~~v  ^
    rank 1            :    waits          |== F0 ==|

The transfer is what lies between the end of the producer and the moment at which the consumer could have started: its
begin, where it waited. Moments of ranks on one machine can be compared. Those of two machines differ by an unknown
offset, which shortens transfers one way as much as it lengthens them the other way; an activation and its gradient are
of one size, so the mean of both ways is known. So is a way that nobody waited for, from the way back.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.p2p import Transfer, transfers
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.listeners.meters.instructions import InstructionMeter, Kind

_MOST_ITERATIONS = 10  # ranks tell each other about
_WAITED_S = 1e-4  # where clocks cannot be compared: shorter gaps lie between instructions that follow each other anyhow


@dataclass(frozen=True)
class RankMoments:
    """When the instructions of one rank began and ended.

    Attributes:
        scope: Moments of ranks with the same one can be compared; see `TimeSource.scope`.
        intervals_s: Begin and end (s) by stage and type, of whole iterations, in the order of execution.
    """

    scope: str
    intervals_s: dict[Kind, list[tuple[float, float]]]

    def iterations(self, order: Sequence[Instruction]) -> list[dict[Instruction, tuple[float, float]]]:
        """Begin and end of each instruction, for each iteration.

        Args:
            order: What the rank executes in an iteration.
        """
        of_kind: dict[Kind, list[Instruction]] = defaultdict(list)
        for instruction in order:
            of_kind[instruction.stage, instruction.type].append(instruction)
        count = min(len(self.intervals_s.get(kind, ())) // len(of_kind[kind]) for kind in of_kind)
        found: list[dict[Instruction, tuple[float, float]]] = [{} for _ in range(count)]
        for kind, instructions in of_kind.items():
            for number, moments in enumerate(found):
                begin = number * len(instructions)
                moments.update(
                    zip(instructions, self.intervals_s[kind][begin : begin + len(instructions)], strict=True)
                )
        return found


@dataclass(frozen=True)
class _Seen:
    """One transfer in one iteration: how long it took at most, and how long its consumer's rank had been waiting."""

    transfer_s: float
    waited_s: float


def measured_transfers(source: InstructionSource, meter: InstructionMeter) -> dict[Kind, float]:
    """Time of the transfers that begin with each kind of instruction, from what ranks have measured since `reset`, s.

    Kinds that send nothing, and those whose transfers nobody waited for, lack. A collective call of the pipeline.
    """
    schedule = source.schedule
    assert schedule is not None  # iterations have been measured
    own: dict[Kind, list[tuple[float, float]]] = {}
    for kind, count in Counter((inst.stage, inst.type) for inst in schedule.orders[source.rank]).items():
        own[kind] = meter.instructions[kind].intervals_s[-_MOST_ITERATIONS * count :]
    return transfer_times(schedule, source.all_gather(RankMoments(meter.scope, own)))


def transfer_times(schedule: PipelineSchedule, by_rank: Sequence[RankMoments]) -> dict[Kind, float]:
    """Time of the transfers that begin with each kind of instruction, s; kinds whose transfers were not seen lack.

    Args:
        schedule: What was executed.
        by_rank: When, by rank.
    """
    seen: dict[Kind, list[_Seen]] = defaultdict(list)
    way_back: dict[Kind, Kind] = {}
    is_comparable: dict[Kind, bool] = {}
    kind_on: dict[tuple[int, int], Kind] = {}  # by the stages that are left and reached
    for transfer, times in _seen(schedule, by_rank):
        kind = (transfer.producer.stage, transfer.producer.type)
        seen[kind].extend(times)
        is_comparable[kind] = by_rank[transfer.source].scope == by_rank[transfer.destination].scope
        kind_on[transfer.producer.stage, transfer.consumer.stage] = kind
    for (left, reached), kind in kind_on.items():
        if (reached, left) in kind_on:
            way_back[kind] = kind_on[reached, left]
    ways = {kind: _one_way_s(seen[kind], is_comparable[kind]) for kind in seen}
    found = {}
    for kind, one_way_s in ways.items():
        back_s = ways[way_back[kind]] if kind in way_back else None
        if not is_comparable[kind]:
            one_way_s = (one_way_s + back_s) / 2 if one_way_s is not None and back_s is not None else None
        elif one_way_s is None:
            one_way_s = back_s
        if one_way_s is not None:
            found[kind] = max(0.0, one_way_s)
    return found


def _one_way_s(seen: Sequence[_Seen], is_comparable: bool) -> float | None:
    """The usual time where the consumer waited; with the offset of two clocks, if these cannot be compared."""
    waited = [
        one.transfer_s
        for one in seen  # waited already when the producer ended
        if one.waited_s >= (one.transfer_s if is_comparable else _WAITED_S)
    ]
    return statistics.median(waited) if waited else None


def _seen(schedule: PipelineSchedule, by_rank: Sequence[RankMoments]) -> Iterator[tuple[Transfer, list[_Seen]]]:
    iterations = [moments.iterations(order) for moments, order in zip(by_rank, schedule.orders, strict=True)]
    before = {
        instruction: order[position - 1] if position else None
        for order in schedule.orders
        for position, instruction in enumerate(order)
    }
    for transfer in transfers(schedule):
        times = []
        for sent, received in zip(iterations[transfer.source], iterations[transfer.destination], strict=False):
            begin_s = received[transfer.consumer][0]
            previous = before[transfer.consumer]
            free_s = received[previous][1] if previous is not None else -math.inf
            times.append(_Seen(begin_s - sent[transfer.producer][1], begin_s - free_s))
        yield transfer, times
