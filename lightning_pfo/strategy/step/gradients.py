"""Moving gradients between the pipeline, which produces them inside a step, and loops, which expect them later.

Lightning's closure runs `training_step`, then `zero_grad`, then `backward`. The pipeline has its gradients already when
`training_step` returns; they are set aside and handed out when Lightning calls backward on the loss. So accumulation,
loss division and the hooks around backward work as they are, in loops of users' own too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import scale_in_place
from lightning_pfo.strategy.parallel.dtensor import local, placed_like

Gradients = list[torch.Tensor | None]


def do_nothing() -> None:
    """What follows backward where nothing does."""


def take_gradients(parameters: Sequence[nn.Parameter]) -> Gradients:
    """Detach the gradients from the parameters and return them."""
    gradients: Gradients = [placed_like(parameter.grad, parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return gradients


def put_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients) -> None:
    """Attach gradients that `take_gradients` returned."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _add_gradients(parameters: Sequence[nn.Parameter], gradients: Gradients, factor: torch.Tensor) -> None:
    present = [local(gradient) for gradient in gradients if gradient is not None]
    if present and (factor.is_cuda or factor != 1):  # looking at it would wait for the GPU, where a pass costs little
        scale_in_place(present, factor)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            local(parameter.grad).add_(local(gradient))


class _LossWithGradients(torch.autograd.Function):
    """Identity on the loss whose backward hands out gradients computed before."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, loss: torch.Tensor, install: Callable[[torch.Tensor], None]) -> Any:
        ctx.install = install
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None]:
        ctx.install(grad_outputs[0])
        return None, None, None


def attach_gradients(
    loss: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    gradients: Gradients,
    loss_scale: torch.Tensor | None = None,
    then: Callable[[], object] = do_nothing,
) -> torch.Tensor:
    """Return `loss` such that `backward` on it adds `gradients`, times its incoming gradient, to the parameters.

    Args:
        loss: 0-dimensional loss value.
        parameters: Where the gradients belong.
        gradients: One per parameter or None; consumed by the first backward.
        loss_scale: What the loss was multiplied with when the gradients were computed.
        then: Called when they have been handed out.
    """
    handle = torch.zeros((), device=loss.device, requires_grad=True)

    def install(factor: torch.Tensor) -> None:
        _add_gradients(parameters, gradients, factor if loss_scale is None else factor / loss_scale)
        then()

    attached: torch.Tensor = _LossWithGradients.apply(handle, loss, install)  # type: ignore[no-untyped-call]
    return attached


def loss_of(result: Any) -> torch.Tensor:
    """The loss that a training step returned.

    Raises:
        ConfigurationError: If it returned none.
    """
    loss = result.get("loss") if isinstance(result, dict) else result
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise ConfigurationError(
            "What training_step returns on a pipeline (in a loop of one's own, the model or loss_fn) is the loss as a "
            "one-element tensor that depends on the model's output, or a dict with it under 'loss'; "
            f"got {_describe(result)}."
        )
    return loss.reshape(())


def _describe(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        return f"a tensor of shape {tuple(result.shape)} with requires_grad={result.requires_grad}"
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)} (transformers' models return a dict with return_dict=True)"
    return f"a dict with keys {list(result)}" if isinstance(result, dict) else repr(result)
