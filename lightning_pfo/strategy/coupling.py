"""Optimizers that do other things than those of torch, found by trying them on two small parameters of a copy.

Some treat parameters together, as by a norm over all gradients (SAM) or a step size for all (Prodigy): does what
becomes of the first depend on whether the second has a gradient? And some need gradients at other weights: do they call
their closure otherwise than once, before they change anything?
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.reach.untouched import steps_unheard

_log = logging.getLogger(__name__)

_LARGEST = 1 << 16
"""Parameters of more elements are not tried with."""
_STEPS = 3
"""What is estimated from the first steps shows in the next ones."""
_TOLERANCE = 1e-3
"""As a share of the way that a parameter goes."""


def check_optimizer(optimizer: Optimizer, grad_norm: str) -> str | None:
    """Check that an optimizer can make its steps from the parameters of one rank.

    Args:
        optimizer: It remains as it is.
        grad_norm: What gives the norm of all gradients, for people.

    Returns:
        What there is to say of one that makes other steps than on one device.

    Raises:
        ConfigurationError: If it cannot.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "LBFGS searches along one direction of all parameters together, but a pipeline rank holds those of its "
            "own stages. Use an optimizer that treats every parameter on its own, such as torch.optim.AdamW."
        )
    if not couples_parameters(optimizer):
        return None
    return (
        f"{type(optimizer).__name__} treats parameters together: what it does to one depends on the gradients of "
        f"others, as by a norm or a step size of all. Each rank makes its step from the parameters of its own stages, "
        f"so it trains otherwise than on one device. Use an optimizer that treats every parameter on its own, such as "
        f"torch.optim.AdamW; or let it take the norm of all stages from {grad_norm}."
    )


def couples_parameters(optimizer: Optimizer) -> bool:
    """Whether what an optimizer does to a parameter depends on the gradients of others; it remains as it is.

    All ranks find the same: only shapes are looked at, which placeholders have too. An optimizer that cannot be tried
    is taken to treat each parameter on its own.
    """
    small = _small(optimizer)
    return len(small) == 2 and _tried(optimizer, lambda: _are_coupled(optimizer, small))


def needs_other_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer calls a closure several times in a step, or after it has changed parameters.

    One that cannot be tried is taken to do as those of torch.
    """
    if optimizer not in _needing:
        small = _small(optimizer)[:1]
        is_known = isinstance(optimizer, torch.optim.LBFGS)
        _needing[optimizer] = is_known or (
            bool(small) and _tried(optimizer, lambda: _calls_otherwise(optimizer, small))
        )
    return _needing[optimizer]


_needing: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()


def _small(optimizer: Optimizer) -> list[nn.Parameter]:
    """Two of its parameters at most; none if it gives something free in its `__del__`, as DeepSpeedCPUAdam.

    A copy would do so too early.
    """
    if any(hasattr(type(each), "__del__") for each in (optimizer, *vars(optimizer).values())):
        return []
    all_of_them = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sorted((p for p in all_of_them if 1 < p.numel() <= _LARGEST), key=lambda p: p.numel())[:2]


def _tried(optimizer: Optimizer, trial: Callable[[], bool]) -> bool:
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), steps_unheard(optimizer):
            return trial()
    except Exception as error:  # optimizers may hold anything, and ask anything of their parameters
        _log.info("%s is not tried: %s", type(optimizer).__name__, error)
        return False


def _are_coupled(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    begin, alone = _stepped(optimizer, parameters, 1)
    _, together = _stepped(optimizer, parameters, 2)
    way = max(float((each - begin).abs().max()) for each in (alone, together))
    return float((alone - together).abs().max()) > _TOLERANCE * way


def _stepped(optimizer: Optimizer, parameters: list[nn.Parameter], with_gradients: int) -> tuple[Any, Any]:
    """The first parameter before and after steps of a copy, in which so many of the parameters have gradients."""
    twin, stand_ins, closure = _trial(optimizer, parameters, with_gradients)
    begin = stand_ins[0].detach().clone()
    for number in range(_STEPS):
        torch.manual_seed(number)  # what it draws for the first one comes first
        closure()
        _step(twin, closure)
    return begin, stand_ins[0].detach()


def _calls_otherwise(optimizer: Optimizer, parameters: list[nn.Parameter]) -> bool:
    twin, stand_ins, closure = _trial(optimizer, parameters, len(parameters))
    begin = stand_ins[0].detach().clone()
    unchanged: list[bool] = []

    def noting() -> torch.Tensor:
        unchanged.append(torch.equal(stand_ins[0].detach(), begin))
        return closure()

    closure()
    _step(twin, noting)
    return len(unchanged) > 1 or not all(unchanged)


def _step(twin: Any, closure: Callable[[], torch.Tensor]) -> None:
    type(twin).step(twin, closure)  # its own may be one that Lightning or a schedule has put there


def _trial(
    optimizer: Optimizer, parameters: list[nn.Parameter], with_gradients: int
) -> tuple[Any, list[nn.Parameter], Callable[[], torch.Tensor]]:
    """A copy, the parameters that it has, and a closure that gives the first of them gradients."""
    torch.manual_seed(0)
    stand_ins = [nn.Parameter(torch.randn(p.shape, dtype=p.dtype)) for p in parameters]
    slopes = [torch.rand_like(each) for each in stand_ins]

    def closure() -> torch.Tensor:
        for stand_in, slope in [*zip(stand_ins, slopes, strict=True)][:with_gradients]:
            stand_in.grad = slope + stand_in.detach()
        return torch.ones(())

    return _twin(optimizer, dict(zip(parameters, stand_ins, strict=True))), stand_ins, closure


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
