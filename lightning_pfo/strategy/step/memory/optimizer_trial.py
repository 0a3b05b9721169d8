"""What optimizers take of memory: their state, which most make in their first step, and what a step takes beside it."""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pfo.strategy.engine.living_bytes import LivingBytes
from lightning_pfo.strategy.model.reach.untouched import steps_unheard
from lightning_pfo.strategy.model.tracing.forms.values import without_reports
from lightning_pfo.strategy.parallel.dtensor import local
from lightning_pfo.strategy.step.memory.substitutes import NoValues

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OptimizerCosts:
    """What optimizers take.

    Attributes:
        state_bytes: Of their states; None: not known before their first step.
        step_bytes: The most that a step takes beside parameters, gradients and states.
    """

    state_bytes: int | None
    step_bytes: int


def try_optimizers(
    optimizers: Sequence[Optimizer], device: torch.device, idle: Collection[nn.Parameter] = ()
) -> OptimizerCosts:
    """Let copies of optimizers take two steps with tensors without values; they themselves remain as they are.

    So does what their classes count, and hooks of all optimizers hear nothing.

    Args:
        optimizers: The optimizers.
        device: Where their parameters are.
        idle: Parameters that have no gradients.
    """
    state = step = 0
    for optimizer in optimizers:
        living = LivingBytes(device)
        try:
            twin = _twin(optimizer, device, living, idle)
            with steps_unheard(optimizer), living, torch.no_grad(), without_reports():
                type(optimizer).step(twin)
                living.peak = made = living.now
                type(optimizer).step(twin)
        except Exception as error:
            _log.info("%s does not step without values: %s", type(optimizer).__name__, error)
            return OptimizerCosts(None, 0)
        state, step = state + made, max(step, living.peak - made)
    return OptimizerCosts(state, step)


def _twin(optimizer: Optimizer, device: torch.device, living: LivingBytes, idle: Collection[nn.Parameter]) -> Any:
    """An optimizer of the same kind that has no state, for parameters without values that have gradients."""
    twin = object.__new__(type(optimizer))
    hooks: dict[str, Any] = {
        name: OrderedDict() for name, value in vars(optimizer).items() if isinstance(value, OrderedDict)
    }
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # as schedulers set it
    vars(twin).update(own | hooks)
    valueless = NoValues()
    twin.state = defaultdict(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        stand_ins = []
        for parameter in group["params"]:
            if parameter.requires_grad and not parameter.is_meta and parameter not in idle:
                stand_in = nn.Parameter(valueless.like(local(parameter.detach())))
                stand_in.grad = valueless.like(local(parameter.detach()))
                living.leave_out((stand_in, stand_in.grad))
                stand_ins.append(stand_in)
        # where it is the default, torch does not see it for parameters of another class
        all_at_once = {"foreach": True} if device.type == "cuda" and _is_by_default(group) else {}
        twin.param_groups.append({**group, "params": stand_ins, **all_at_once})
    return twin


def _is_by_default(group: dict[str, Any]) -> bool:
    return "foreach" in group and group["foreach"] is None and not group.get("fused")
