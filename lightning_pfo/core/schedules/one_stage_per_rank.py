"""Schedules of one stage per rank: warm-up forwards, then backward and forward in turn, then the last backwards.

They differ in one number per rank, how many forwards warm up: `stages - stage` is 1F1B, all of them is GPipe, and
anything between is an early-forward schedule (see `envpipe`).
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, InstructionType, Orders

_F, _B = InstructionType.FORWARD, InstructionType.BACKWARD


def warm_up_orders(warm_ups: Sequence[int], num_microbatches: int) -> Orders:
    """Orders of stages that run `warm_ups[stage]` forwards, then B and F in turn, then the remaining backwards.

    Live whenever no stage warms up more than the one before it: B_m of a stage needs F_m of the next stage, whose
    input is the forward of the same microbatch here, so it must not come after B_m here.

    Args:
        warm_ups: Number of forwards before the first backward, by stage, from 1 to `num_microbatches`.
        num_microbatches: Number of microbatches per iteration.
    """
    orders = []
    for stage, warm_up in enumerate(warm_ups):
        order = [Instruction(stage, _F, m) for m in range(warm_up)]
        for m in range(num_microbatches):
            order.append(Instruction(stage, _B, m))
            if m + warm_up < num_microbatches:
                order.append(Instruction(stage, _F, m + warm_up))
        orders.append(tuple(order))
    return tuple(orders)


def one_f_one_b_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """1F1B: stage s warms up with `num_ranks - s` forwards (Narayanan et al., SOSP 2019, PipeDream-Flush).

    Raises:
        ConfigurationError: If there are fewer microbatches than stages.
    """
    if num_microbatches < num_ranks:
        raise ConfigurationError(
            f"1F1B needs num_microbatches >= num_stages; got num_microbatches={num_microbatches} for "
            f"{num_ranks} stages. Use num_microbatches={num_ranks} or more."
        )
    return warm_up_orders(range(num_ranks, 0, -1), num_microbatches)


def gpipe_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """GPipe: all forwards, then all backwards (Huang et al., NeurIPS 2019).

    Backwards run in the order of the forwards, as in torch; the paper draws them last microbatch first. Either way a
    stage keeps the activations of all microbatches.
    """
    return warm_up_orders([num_microbatches] * num_ranks, num_microbatches)
