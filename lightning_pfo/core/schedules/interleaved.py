"""Several stages per rank, placed in a loop (rank r runs stages r, r + ranks, ...): depth first and breadth first.

Depth first (interleaved 1F1B) pushes a round of about `ranks` microbatches through all stages of a rank before it
takes the next round; breadth first (looped BFS) runs all microbatches on a stage before it goes to the next one.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, InstructionType, Orders

_F, _B = InstructionType.FORWARD, InstructionType.BACKWARD
_I, _W = InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT


def interleaved_1f1b_orders(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """Interleaved 1F1B (Narayanan et al., SC 2021), for any number of microbatches that divides into rounds.

    A rank warms up with `(stages_per_rank - 1) x round + 2 x (ranks - 1 - rank)` forwards, then runs F and B in turn.

    Raises:
        ConfigurationError: If the microbatches do not divide into equal rounds.
    """
    per_round = _microbatches_per_round("interleaved_1f1b", num_ranks, num_microbatches)
    walk = list(_depth_first(num_microbatches, stages_per_rank, per_round))
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Instruction(stages[chunk], _F, m) for chunk, m in walk]
        backwards = [Instruction(stages[-1 - chunk], _B, m) for chunk, m in walk]
        warm_up = min(len(walk), (stages_per_rank - 1) * per_round + 2 * (num_ranks - 1 - rank))
        order = forwards[:warm_up]
        for i, backward in enumerate(backwards):
            order += [*forwards[warm_up + i : warm_up + i + 1], backward]
        orders.append(tuple(order))
    return tuple(orders)


def interleaved_zero_bubble_orders(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """Interleaved ZB-H1 (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024; torch calls it ZB1P).

    As interleaved 1F1B with half as many warm-up forwards per hop, and the backward split: input gradients are sent
    on at once, weight gradients lag by `rank` of them and fill what were bubbles at the end.

    Raises:
        ConfigurationError: If the microbatches do not divide into equal rounds.
    """
    per_round = _microbatches_per_round("interleaved_zero_bubble", num_ranks, num_microbatches)
    walk = list(_depth_first(num_microbatches, stages_per_rank, per_round))
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Instruction(stages[chunk], _F, m) for chunk, m in walk]
        weights = [Instruction(stages[-1 - chunk], _W, m) for chunk, m in walk]
        warm_up = min(len(walk), (stages_per_rank - 1) * per_round + (num_ranks - 1 - rank))
        order = forwards[:warm_up]
        for i, weight in enumerate(weights):
            order += [*forwards[warm_up + i : warm_up + i + 1], Instruction(weight.stage, _I, weight.microbatch)]
            if i >= rank:
                order.append(weights[i - rank])
        orders.append((*order, *weights[max(0, len(weights) - rank) :]))
    return tuple(orders)


def looped_bfs_orders(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Orders:
    """Breadth-first pipeline parallelism (Lamy-Poirier, MLSys 2023): GPipe over each stage of the rank in turn.

    Backwards run from the last stage and the last microbatch to the first.
    """
    orders = []
    for rank in range(num_ranks):
        stages = range(rank, num_ranks * stages_per_rank, num_ranks)
        forwards = [Instruction(stage, _F, m) for stage in stages for m in range(num_microbatches)]
        backwards = [Instruction(inst.stage, _B, inst.microbatch) for inst in reversed(forwards)]
        orders.append((*forwards, *backwards))
    return tuple(orders)


def _depth_first(num_microbatches: int, num_chunks: int, per_round: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, microbatch): each round of microbatches through all chunks, then the next round."""
    for start in range(0, num_microbatches, per_round):
        for chunk in range(num_chunks):
            for microbatch in range(start, start + per_round):
                yield chunk, microbatch


def _microbatches_per_round(name: str, num_ranks: int, num_microbatches: int) -> int:
    num_rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % num_rounds:
        raise ConfigurationError(
            f"{name} runs num_microbatches // num_ranks = {num_rounds} equal rounds on {num_ranks} ranks; "
            f"num_microbatches={num_microbatches} does not divide by {num_rounds}. "
            f"Use num_microbatches={num_microbatches // num_ranks * num_ranks} or another multiple of {num_ranks}."
        )
    return num_microbatches // num_rounds
