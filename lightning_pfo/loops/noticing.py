"""Noticing what does not know of a pipeline's ranks: norms of gradients, optimizers and their states, `grad`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops.compat import heed_differentiation
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.coupling import check_optimizer
from lightning_pfo.strategy.model.tracing.gradient_readers import Reader, tell_of_readers
from lightning_pfo.strategy.state.placeholders import refuse_saving_part
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.within import within_step
from lightning_pfo.strategy.step.gradients import hands_gradients_out


def tell_of_norms(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Name what reads gradients of the parameters of a pipeline.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: When it is closed, all may be read.
    """
    method = weakref.WeakMethod(parameters)

    def told(placeholder: torch.Tensor, reader: Reader) -> None:
        own = method()
        if own is None or all(parameter is not placeholder for parameter in own()):
            return
        norm, whole = "model.clip_grad_norm_(float('inf'))", "model.whole_parameters(gradients=True)"
        warn_once(reader.told(norm, whole, in_step=within_step()))

    tell_of_readers(told, patches)


def check_at_first_step(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Refuse, or warn of, optimizers that treat parameters of several stages together; of all, refuse parts of states.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: When it is closed, optimizers are of no concern any more.
    """
    method = weakref.WeakMethod(parameters)
    checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def check(optimizer: Optimizer, *_: Any) -> None:
        if optimizer in checked or (own := method()) is None:
            return
        checked.add(optimizer)
        of_model = {id(parameter) for parameter in own()}
        if any(id(parameter) in of_model for group in optimizer.param_groups for parameter in group["params"]):
            refuse_saving_part(optimizer)
            warning = check_optimizer(optimizer, "model.clip_grad_norm_(float('inf'))")
            if warning:
                warn_once(warning)

    patches.callback(register_optimizer_step_pre_hook(check).remove)


def refuse_grad(parameters: Callable[[], Iterable[nn.Parameter]], patches: Patches) -> None:
    """Refuse to differentiate the loss of a step by parameters otherwise than by its `backward`.

    Args:
        parameters: Method of the pipelined model that gives them; the model is not kept alive.
        patches: When it is closed, nothing is refused.
    """
    method = weakref.WeakMethod(parameters)

    def refuse(outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        wanted = {id(each) for each in inputs if isinstance(each, nn.Parameter)}
        tensors = (each for each in outputs if isinstance(each, torch.Tensor))  # and no edge of a graph
        if not wanted or not any(map(hands_gradients_out, tensors)) or (own := method()) is None:
            return
        if any(id(parameter) in wanted for parameter in own()):
            raise ConfigurationError(
                "A pipeline hands its gradients out when backward runs from the loss, each to p.grad on the ranks that "
                "hold p; torch.autograd.grad(loss, parameters), or backward(inputs=parameters), would find none. Call "
                "loss.backward() or accelerator.backward(loss), and read p.grad."
            )

    heed_differentiation(refuse, patches)


def refuse_pipelined(kind: type[nn.Module], module: nn.Module) -> None:
    """Refuse a module that is on a pipeline already, or has one within it.

    Args:
        kind: The class of pipelined models.
        module: The module.

    Raises:
        ConfigurationError: If so.
    """
    if any(isinstance(each, kind) for each in module.modules()):
        raise ConfigurationError(
            "This model is on a pipeline already, whose ranks hold its layers. Use it as it is; to divide it in "
            "another way, call its release() on every rank and give a new module, which load_state_dict fills with "
            "what full_state_dict() has gathered before."
        )


def refuse_ddp(kind: type[nn.Module], patches: Patches) -> None:
    """Refuse to wrap a pipelined model, of which each rank holds other parameters.

    Args:
        kind: The class of pipelined models.
        patches: When it is closed, nothing is refused.
    """
    make = DistributedDataParallel.__init__

    @wraps(make)
    def refuse(ddp: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, kind):
            raise ConfigurationError(
                "A pipeline averages the gradients of its replicas itself, and its ranks hold different parameters, so "
                "that DistributedDataParallel has nothing to average. Use the pipelined model as it is; more replicas "
                "are made by data_parallel_size=2."
            )
        make(ddp, module, *args, **kwargs)

    patches.set(DistributedDataParallel, "__init__", refuse)
