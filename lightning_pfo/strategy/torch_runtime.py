"""Running a pipeline schedule on torch.distributed.pipelining: the only module that uses its private parts.

1F1B and GPipe with one stage per rank run on torch's public classes. Every other order runs on the runtime behind
torch's multi-stage schedules, which is private: it takes an order of computations and derives sends and receives in an
order that cannot deadlock.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, schedules

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.pipeline_schedule import PipelineSchedule
from lightning_pfo.strategy.stage import EventStage

_NAMES = {
    InstructionType.FORWARD: "FORWARD",
    InstructionType.BACKWARD: "FULL_BACKWARD",
    InstructionType.INPUT_GRADIENT: "BACKWARD_INPUT",
    InstructionType.WEIGHT_GRADIENT: "BACKWARD_WEIGHT",
}


class TorchSchedule(Protocol):
    """What torch's schedule classes have in common."""

    def step(self, *args: Any, target: Any = None, return_outputs: bool = True) -> Any:
        """Run forward and backward."""

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Run forward only."""


def training_schedule(
    stages: Sequence[EventStage],
    placement: Sequence[int],
    order: PipelineSchedule,
    loss_fn: Callable[..., torch.Tensor],
) -> TorchSchedule:
    """Make torch's schedule for training iterations.

    Args:
        stages: The stages of this rank.
        placement: Rank of every stage.
        order: What every rank executes.
        loss_fn: Called with the output of the last stage and the target; its result is differentiated as it is.
    """
    if _one_stage_per_rank(placement) and order.name in ("1f1b", "gpipe"):
        schedule_class = Schedule1F1B if order.name == "1f1b" else ScheduleGPipe
        return schedule_class(stages[0], order.num_microbatches, loss_fn=loss_fn, scale_grads=False)
    runtime = _runtime(stages, placement, order.num_microbatches, loss_fn)
    runtime._prepare_schedule_with_comms(
        {
            rank: [_action(inst.stage, inst.type, inst.microbatch) for inst in row]
            for rank, row in enumerate(order.orders)
        }
    )
    return runtime  # type: ignore[no-any-return]


def evaluation_schedule(
    stages: Sequence[EventStage], placement: Sequence[int], num_microbatches: int, loss_fn: Callable[..., torch.Tensor]
) -> TorchSchedule:
    """Make torch's schedule for forwards only: stage by stage, each with all microbatches.

    torch's own `eval` of V-shaped schedules fails, because their order contains backwards.
    """
    if _one_stage_per_rank(placement):
        return ScheduleGPipe(stages[0], num_microbatches, loss_fn=loss_fn)
    runtime = _runtime(stages, placement, num_microbatches, loss_fn)
    forwards: dict[int, list[Any]] = {rank: [] for rank in sorted(set(placement))}
    for stage, rank in enumerate(placement):
        forwards[rank] += [_action(stage, InstructionType.FORWARD, index) for index in range(num_microbatches)]
    runtime.pipeline_order_with_comms = schedules._add_send_recv(
        forwards, stage_to_rank=lambda stage: placement[stage], num_stages=len(placement)
    )
    return runtime  # type: ignore[no-any-return]


def _one_stage_per_rank(placement: Sequence[int]) -> bool:
    return tuple(placement) == tuple(range(len(placement)))


def _runtime(
    stages: Sequence[EventStage], placement: Sequence[int], num_microbatches: int, loss_fn: Callable[..., torch.Tensor]
) -> Any:
    check_private_api()
    runtime = schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), num_microbatches, loss_fn=loss_fn, scale_grads=False
    )
    runtime.stage_index_to_group_rank = dict(enumerate(placement))
    for stage in stages:
        stage.stage_index_to_group_rank = runtime.stage_index_to_group_rank
    return runtime


def _action(stage: int, kind: InstructionType, microbatch: int) -> Any:
    return schedules._Action(stage, getattr(schedules._ComputationType, _NAMES[kind]), microbatch)


def check_private_api() -> None:
    """Check that this torch has the private runtime in the form used here.

    Raises:
        ConfigurationError: If not; names the torch version and what works without it.
    """
    runtime = getattr(schedules, "_PipelineScheduleRuntime", None)
    prepare = getattr(runtime, "_prepare_schedule_with_comms", None)
    has_all = (
        prepare is not None
        and "actions" in inspect.signature(prepare).parameters
        and all(hasattr(getattr(schedules, "_ComputationType", None), name) for name in _NAMES.values())
        and hasattr(schedules, "_Action")
        and hasattr(schedules, "_add_send_recv")
    )
    if not has_all:
        raise ConfigurationError(
            f"Schedules other than '1f1b' and 'gpipe' need a part of torch.distributed.pipelining that torch "
            f"{torch.__version__} does not have (2.13 does). Use schedule='1f1b'."
        )
