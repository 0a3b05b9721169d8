"""Inputs that have a graph: what a generator makes, or a prompt that is learned.

Each stage runs the call of the model, and for each microbatch, so the graph before it would be gone through many times.
Therefore the step gets leaves with the same values. When its gradients are there, those of the leaves are added up over
the ranks whose stages compute with them; `backward` on the loss hands them to the graph, on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.step.gradients import without_gradients


class InputsWithGraph:
    """The tensors of a batch through which gradients are to flow; false if there are none.

    Args:
        batch: The batch.

    Attributes:
        batch: The same with leaves in their place.
    """

    def __init__(self, batch: Any) -> None:
        self._leaves: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the original's id
        self.batch = tree_map_only(torch.Tensor, self._leaf_of, batch)

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def _leaf_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        return self._leaves.setdefault(id(tensor), (tensor, tensor.detach().requires_grad_()))[1]

    def attach(
        self, loss: torch.Tensor, group: dist.ProcessGroup | None, loss_scale: torch.Tensor | None
    ) -> torch.Tensor:
        """Let `backward` on the loss hand out the gradients of the inputs too; a collective call of a pipeline's ranks.

        Args:
            loss: The loss of the step.
            group: The pipeline's ranks.
            loss_scale: What the loss was multiplied with when the gradients were computed.
        """
        originals = [original for original, _ in self._leaves.values()]
        gradients = []
        for _, leaf in self._leaves.values():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
            dist.all_reduce(gradient, group=group)
            gradients.append(gradient if loss_scale is None else gradient / loss_scale)
        attached: torch.Tensor = _LossOfInputs.apply(gradients, loss, *originals)  # type: ignore[no-untyped-call]
        return attached


class _LossOfInputs(torch.autograd.Function):
    """Identity on the loss, with gradients of inputs that were computed before."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], loss: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (factor,) = grad_outputs
        found = [gradient * factor.to(gradient.dtype) for gradient in ctx.gradients]
        if torch.is_grad_enabled():  # by create_graph=True: somebody may differentiate what comes of them
            found = [without_gradients(gradient, _NO_SECOND) for gradient in found]
        return (None, factor, *found)


_NO_SECOND = (
    "A pipeline computes the first derivatives of its loss, which depend on weights of all stages: what is made of "
    "them (torch.autograd.grad(loss, x, create_graph=True), a gradient penalty) cannot be differentiated, and would "
    "not train. Let one module differentiate in its own forward, which is one layer then, or leave the penalty out; "
    "gradients that are only looked at, as by x.grad.norm().detach(), are those of one device."
)
