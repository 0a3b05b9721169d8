"""The order of instructions on each rank of a pipeline, and what must precede what.

1F1B (4 stages, 6 microbatches), each row a rank::

    rank 0  F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5      warm-up: 4 forwards
    rank 1  F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5      steady:  B, F alternating
    rank 2  F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5      cool-down: the remaining backwards
    rank 3  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5

A rank may run several stages, in any placement: a stage belongs to the rank whose order contains it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeVar

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, InstructionType, Orders
from lightning_pfo.core.wording import counted

_T = TypeVar("_T")
_F, _B = InstructionType.FORWARD, InstructionType.BACKWARD
_INPUT, _WEIGHT = InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT
_COMPLETE = ({_F, _B}, {_F, _INPUT, _WEIGHT})
"""What a stage computes of a microbatch: its backward as a whole, or both of its halves."""
_GRID_CELLS = 24  # of a row, drawn around a mark


@dataclass(frozen=True)
class PipelineSchedule:
    """An order of instructions for each rank.

    Attributes:
        name: The name that makes it again, e.g. `1f1b`, `envpipe:4,4,2,0` or `file:mine.txt`.
        num_stages: Number of stages.
        num_microbatches: Number of microbatches per iteration.
        orders: One tuple of instructions per rank, in execution order.
    """

    name: str
    num_stages: int
    num_microbatches: int
    orders: Orders

    @cached_property
    def instructions(self) -> tuple[Instruction, ...]:
        """All instructions, rank by rank in execution order."""
        return tuple(instruction for order in self.orders for instruction in order)

    def span(self, rank: int) -> slice:
        """Where the instructions of a rank are among `instructions`."""
        return self._spans[rank]

    def by_rank(self, values: Sequence[_T]) -> tuple[tuple[_T, ...], ...]:
        """What is aligned with `instructions` as one row per rank, aligned with `orders`."""
        return tuple(tuple(values[span]) for span in self._spans)

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Rank and position of each of `instructions`."""
        return tuple((rank, position) for rank, order in enumerate(self.orders) for position in range(len(order)))

    @cached_property
    def _spans(self) -> tuple[slice, ...]:
        return tuple(slice(*bounds) for bounds in pairwise(accumulate(map(len, self.orders), initial=0)))

    @property
    def num_ranks(self) -> int:
        """Number of ranks; each runs at least one stage."""
        return len(self.orders)

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        return {inst.stage: rank for rank, order in enumerate(self.orders) for inst in order}

    def rank_of(self, stage: int) -> int:
        """The rank that runs `stage`."""
        return self._rank_of[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` runs, ascending."""
        return tuple(sorted({inst.stage for inst in self.orders[rank]}))

    def dependencies(self) -> Iterator[tuple[Instruction, Instruction]]:
        """Yield every pair (before, after) that the order within a rank and the flow of data impose."""
        for order in self.orders:
            yield from pairwise(order)
        yield from self._data_flow

    @cached_property
    def _data_flow(self) -> tuple[tuple[Instruction, Instruction], ...]:
        """Who needs the result of whom.

        Between stages activations (`0F3 -> 1F3`) and gradients (`1B3 -> 0B3`); on the last stage the loss
        (`3F3 -> 3B3`); and a weight gradient after its input gradient.
        """
        present, last, pairs = set(self.instructions), self.num_stages - 1, []
        for inst in self.instructions:
            if inst.type is _F:
                if inst.stage > 0:
                    pairs.append((Instruction(inst.stage - 1, _F, inst.microbatch), inst))
            elif inst.type is _WEIGHT:
                pairs.append((Instruction(inst.stage, _INPUT, inst.microbatch), inst))
            elif inst.stage == last:
                pairs.append((Instruction(last, _F, inst.microbatch), inst))
            else:
                following = (Instruction(inst.stage + 1, kind, inst.microbatch) for kind in (_B, _INPUT))
                pairs += [(before, inst) for before in following if before in present]
        return tuple(pairs)

    def handovers(self) -> dict[Instruction, Instruction]:
        """Which instruction of the neighbouring stage needs the activations or gradients of which."""
        return {before: after for before, after in self._data_flow if before.stage != after.stage}

    def validate(self) -> None:
        """Check that every stage computes every microbatch once, on one rank, and that the order can be executed.

        Raises:
            ConfigurationError: If an instruction is missing, doubled or foreign, if a stage is on two ranks or a rank
                has none, or if ranks wait for each other in a circle. The grid is drawn with the cell in brackets.
        """
        _ = self._is_checked

    @cached_property
    def _is_checked(self) -> bool:
        self._check_complete()
        self._check_placement()
        for _ in self.rounds():
            pass
        return True

    def check_numbers(
        self,
        *,
        num_ranks: int | None = None,
        num_microbatches: int | None = None,
        stages_per_rank: int | None = None,
    ) -> None:
        """Check what is said about an order that a file or a user gives, and that has its own numbers.

        Args:
            num_ranks: Number of ranks that it is to have.
            num_microbatches: Number of microbatches that it is to have.
            stages_per_rank: Number of stages that every rank is to run.

        Raises:
            ConfigurationError: If one that is given is not the order's own.
        """
        given = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "stages_per_rank": stages_per_rank}
        stages = [len(self.stages_of(rank)) for rank in range(self.num_ranks)]
        own = [{self.num_ranks}, {self.num_microbatches}, set(stages)]
        for (name, number), numbers in zip(given.items(), own, strict=True):
            if number is not None and numbers != {number}:
                raise ConfigurationError(
                    f"{name}={number} contradicts the given schedule {self.name!r}, an order for "
                    f"{counted(self.num_microbatches, 'microbatch', 'microbatches')} on "
                    f"{counted(self.num_ranks, 'rank')} of {' or '.join(map(str, sorted(set(stages))))} stage(s) each. "
                    "Leave it out or make them equal."
                )

    def rounds(self) -> Iterator[tuple[Instruction, ...]]:
        """Execute the order in lock-step: yield what runs in each round, at most one instruction per rank.

        Every instruction takes one round, and what it needs must have run in an earlier one. Transfers take no time
        and wait in the channel until they are asked for; `p2p` looks at what a channel without room does.

        Raises:
            ConfigurationError: If no rank can go on.
        """
        num_awaited = dict.fromkeys(self.instructions, 0)
        waiting_for: dict[Instruction, list[Instruction]] = {}
        for before, after in self._data_flow:  # the order within a rank is kept anyway
            num_awaited[after] += 1
            waiting_for.setdefault(before, []).append(after)
        position = [0] * self.num_ranks
        running = list(range(self.num_ranks))
        while running:
            following = [(rank, self.orders[rank][position[rank]]) for rank in running]
            ready = [(rank, inst) for rank, inst in following if not num_awaited[inst]]
            if not ready:
                self._raise_deadlock(position)
            yield tuple(inst for _, inst in ready)
            for rank, inst in ready:
                position[rank] += 1
                for after in waiting_for.get(inst, ()):
                    num_awaited[after] -= 1
            running = [rank for rank in running if position[rank] < len(self.orders[rank])]

    def grid(self, *marks: Instruction) -> str:
        """Draw the order, one line per rank; marked instructions are in brackets.

        Without marks the whole order is drawn. With marks, long rows are cut to what surrounds their first mark.
        """
        width = max((len(str(inst)) for inst in self.instructions), default=0) + 2
        marked_columns = [self._first_column(rank, marks) for rank in range(self.num_ranks)]
        default = next((column for column in marked_columns if column is not None), 0)
        lines = []
        for rank, order in enumerate(self.orders):
            column = marked_columns[rank]
            start = max(0, (default if column is None else column) - _GRID_CELLS // 2) if marks else 0
            stop = start + _GRID_CELLS if marks else len(order)
            cells = [f"[{inst}]" if inst in marks else f" {inst} " for inst in order[start:stop]]
            line = "".join(cell.ljust(width) for cell in cells).rstrip()
            lines.append(f"rank {rank} {'...' if start else ''}{line}{' ...' if stop < len(order) else ''}")
        return "\n".join(lines)

    def _first_column(self, rank: int, marks: tuple[Instruction, ...]) -> int | None:
        return next((column for column, inst in enumerate(self.orders[rank]) if inst in marks), None)

    def _check_complete(self) -> None:
        repeated = [inst for inst, count in Counter(self.instructions).items() if count > 1]
        if repeated:
            raise ConfigurationError(
                f"Each instruction runs once; schedule {self.name!r} repeats {_some(repeated)}. Leave the others out."
                f"\n{self.grid(*repeated)}"
            )
        present: dict[tuple[int, int], set[InstructionType]] = {}
        for inst in self.instructions:
            present.setdefault((inst.stage, inst.microbatch), set()).add(inst.type)
        foreign = []
        for stage in range(self.num_stages):
            for microbatch in range(self.num_microbatches):
                kinds = present.pop((stage, microbatch), set())
                complete = next((group for group in _COMPLETE if group <= kinds), None)
                if complete is None:
                    here = [Instruction(stage, kind, microbatch) for kind in kinds]
                    raise ConfigurationError(
                        f"Every stage needs a forward and either a full backward (B) or both I and W for each "
                        f"microbatch; schedule {self.name!r} lacks one at stage {stage}, microbatch {microbatch}: "
                        f"it has {_some(here) or 'nothing'}.\n{self.grid(*here)}"
                    )
                foreign += [Instruction(stage, kind, microbatch) for kind in kinds - complete]
        foreign += [Instruction(stage, kind, mb) for (stage, mb), kinds in present.items() for kind in kinds]
        if foreign:
            raise ConfigurationError(
                f"Schedule {self.name!r} has {self.num_stages} stages and {self.num_microbatches} microbatches, "
                f"but contains {_some(foreign)}. Leave them out or raise the numbers.\n{self.grid(*foreign)}"
            )

    def _check_placement(self) -> None:
        for rank, order in enumerate(self.orders):
            if not order:
                raise ConfigurationError(
                    f"Every rank runs at least one stage; rank {rank} of schedule {self.name!r} has no instructions. "
                    f"Use {sum(map(bool, self.orders))} ranks.\n{self.grid()}"
                )
            for inst in order:
                if self.rank_of(inst.stage) != rank:
                    raise ConfigurationError(
                        f"A stage runs on one rank, which keeps its weights; schedule {self.name!r} runs stage "
                        f"{inst.stage} on ranks {rank} and {self.rank_of(inst.stage)}.\n{self.grid(inst)}"
                    )

    def _raise_deadlock(self, position: Sequence[int]) -> None:
        done = {inst for order, num_done in zip(self.orders, position, strict=True) for inst in order[:num_done]}
        stuck = [order[num_done] for order, num_done in zip(self.orders, position, strict=True) if order[num_done:]]
        needed = {inst: {before for before, after in self._data_flow if after == inst} for inst in stuck}
        waits = "; ".join(f"{inst} for {_some(needed[inst] - done)}" for inst in stuck)
        raise ConfigurationError(
            f"Schedule {self.name!r} deadlocks: each of {', '.join(map(str, stuck))} waits for an instruction that "
            f"comes later ({waits}). Reorder the ranks so that forwards precede the backwards that need them."
            f"\n{self.grid(*stuck)}"
        )


def forward_only(placement: Sequence[int], num_microbatches: int) -> PipelineSchedule:
    """Forwards alone, for evaluation: stage by stage, each with all microbatches.

    Args:
        placement: Rank of every stage.
        num_microbatches: Number of microbatches.
    """
    rows: list[list[Instruction]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        rows[rank] += [Instruction(stage, _F, microbatch) for microbatch in range(num_microbatches)]
    return PipelineSchedule("forward only", len(placement), num_microbatches, tuple(map(tuple, rows)))


def all_forwards_first(placement: Sequence[int], num_microbatches: int) -> PipelineSchedule:
    """Forwards stage by stage, then backwards: a training iteration that any number of microbatches can run.

    Args:
        placement: Rank of every stage.
        num_microbatches: Number of microbatches.
    """
    rows = [list(order) for order in forward_only(placement, num_microbatches).orders]
    for stage, rank in reversed(list(enumerate(placement))):
        rows[rank] += [Instruction(stage, _B, index) for index in range(num_microbatches)]
    return PipelineSchedule("all forwards first", len(placement), num_microbatches, tuple(map(tuple, rows)))


def loss_waits_for_all(schedule: PipelineSchedule) -> bool:
    """Whether the last stage goes backward only when all its forwards are done, as in GPipe."""
    last = schedule.num_stages - 1
    kinds = [inst.type is _F for inst in schedule.orders[schedule.rank_of(last)] if inst.stage == last]
    return kinds == sorted(kinds, reverse=True)


def _some(instructions: Collection[Instruction], limit: int = 8) -> str:
    """The first few, as text."""
    shown = sorted(map(str, instructions))[:limit]
    return ", ".join(shown) + (" ..." if len(instructions) > limit else "")
