"""The private parts of torch in use: splitting a backward into input and weight gradients.

Only schedules with I and W instructions (`interleaved_zero_bubble`, `zbv`, `dualpipev`, some files) need them; torch
has no public function for it. They are looked for when such a schedule is made, so that another torch is refused by
name before training, and everything else runs on public parts alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.pipeline_schedule import PipelineSchedule

_PARAMETERS = {
    "stage_backward_input": ["stage_outputs_or_loss", "output_grads", "input_values", "weights"],
    "stage_backward_weight": ["weights", "param_groups", "retain_graph"],
}
"""Names and parameters of the functions, as in torch 2.13."""


def check_split_backward(schedule: PipelineSchedule) -> None:
    """Check that this torch can run what the schedule asks for.

    Raises:
        ConfigurationError: If the schedule splits backwards and this torch does not have the functions in the form used
            here; names the torch version and what works without them.
    """
    if not any(instruction.type is InstructionType.INPUT_GRADIENT for instruction in schedule.instructions):
        return
    module = _split_backward()
    found = {
        name: list(inspect.signature(function).parameters)
        for name in _PARAMETERS
        if (function := getattr(module, name, None)) is not None
    }
    if found != _PARAMETERS:
        raise ConfigurationError(
            f"Schedule {schedule.name!r} splits backwards (I and W), for which torch {torch.__version__} has no "
            f"functions that are known here (2.13 has: torch.distributed.pipelining._backward). Use a schedule with "
            f"whole backwards, such as 1f1b or interleaved_1f1b, or torch 2.13."
        )


@cache
def _split_backward() -> Any:
    try:
        from torch.distributed.pipelining import _backward  # takes long to import, and few schedules need it
    except ImportError:
        return None
    return _backward


def backward_of_inputs(
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    parameters: Iterator[nn.Parameter],
) -> Any:
    """Add the gradients of `inputs` to their `.grad`, and return what `backward_of_weights` needs.

    Args:
        outputs: Differentiable outputs; detached afterwards.
        gradients: Their gradients; empty for a loss.
        inputs: Leaves that require gradients.
        parameters: All parameters that may have been used.
    """
    # torch detaches the outputs in place, which views do not allow
    owned = [output.clone() if output._is_view() else output for output in outputs]
    _, groups = _split_backward().stage_backward_input(owned, list(gradients) or None, list(inputs), parameters)
    return groups


def backward_of_weights(parameters: Iterator[nn.Parameter], groups: Any) -> None:
    """Add the gradients of the parameters to their `.grad`."""
    _split_backward().stage_backward_weight(parameters, groups)
