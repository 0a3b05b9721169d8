"""Optimizers that treat parameters together, as by a norm over all gradients (SAM) or a step size for all (Prodigy).

Whether one does is tried, on two small parameters of a copy: does what becomes of the first depend on whether the
second has a gradient?
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_log = logging.getLogger(__name__)

_LARGEST = 1 << 16
"""Parameters of more elements are not tried with."""
_STEPS = 3
"""What is estimated from the first steps shows in the next ones."""
_TOLERANCE = 1e-3
"""As a share of the way that a parameter goes."""


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether what an optimizer does to a parameter depends on the gradients of others; it remains as it is.

    All ranks find the same: only shapes are looked at, which placeholders have too. An optimizer of which no copy can
    be made is taken to treat each parameter on its own, and so is one that gives something free in its `__del__`, as
    DeepSpeedCPUAdam: the copy would do so too early.
    """
    if any(hasattr(type(each), "__del__") for each in (optimizer, *vars(optimizer).values())):
        return False
    all_of_them = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    small = sorted((p for p in all_of_them if 1 < p.numel() <= _LARGEST), key=lambda p: p.numel())[:2]
    if len(small) < 2:
        return False
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            begin, alone = _stepped(optimizer, small, 1)
            _, together = _stepped(optimizer, small, 2)
    except Exception as error:  # optimizers may hold anything, and ask anything of their parameters
        _log.info("%s is not tried: %s", type(optimizer).__name__, error)
        return False
    way = max(float((each - begin).abs().max()) for each in (alone, together))
    return float((alone - together).abs().max()) > _TOLERANCE * way


def _stepped(optimizer: Optimizer, parameters: list[nn.Parameter], with_gradients: int) -> tuple[Any, Any]:
    """The first parameter before and after steps of a copy, in which so many of the parameters have gradients."""
    torch.manual_seed(0)
    stand_ins = [nn.Parameter(torch.randn(p.shape, dtype=p.dtype)) for p in parameters]
    slopes = [torch.rand_like(each) for each in stand_ins]
    twin = _twin(optimizer, dict(zip(parameters, stand_ins, strict=True)))
    begin = stand_ins[0].detach().clone()

    def closure() -> torch.Tensor:
        for stand_in, slope in [*zip(stand_ins, slopes, strict=True)][:with_gradients]:
            stand_in.grad = slope + stand_in.detach()
        return torch.ones(())

    step: Callable[..., Any] = type(optimizer).step
    for number in range(_STEPS):
        torch.manual_seed(number)  # what it draws for the first one comes first
        closure()
        step(twin, closure)
    return begin, stand_ins[0].detach()


def _twin(optimizer: Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]) -> Any:
    """A copy that has no state, and stand-ins for some of the parameters, in place of all."""
    memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    memo |= {id(parameter): stand_in for parameter, stand_in in stand_ins.items()}
    hooks = [name for name, value in vars(optimizer).items() if isinstance(value, OrderedDict)]
    own = {name: value for name, value in vars(optimizer).items() if name not in ("step", "state", *hooks)}
    twin = object.__new__(type(optimizer))
    vars(twin).update(copy.deepcopy(own, memo), state=defaultdict(dict), **{name: OrderedDict() for name in hooks})
    kept = set(stand_ins.values())
    for group in twin.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if parameter in kept]
    twin.param_groups[:] = [group for group in twin.param_groups if group["params"]]
    return twin
