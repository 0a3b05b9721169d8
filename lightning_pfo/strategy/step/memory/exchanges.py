"""What FSDP2 takes of memory in backwards that exchange the gradients of divided layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_pfo.strategy.parallel.fsdp import LETS_GO_EARLY, Sharding


class Exchanges:
    """Does with gradients of layers what FSDP2 does, but for sending them.

    Args:
        sharding: How layers are divided over replicas.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self._sent: list[torch.Tensor] = []
        self._averaged: list[torch.Tensor] = []

    def of_layer(self, parameters: Sequence[torch.Tensor]) -> None:
        """Let the gradients of a layer go in each backward, when all are there and have been put in a row."""

        def look(_: torch.Tensor) -> None:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if len(gradients) == len(parameters):
                for parameter in parameters:
                    parameter.grad = None
                self._exchange(gradients)

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """A backward has ended."""
        self._sent.clear()
        self._averaged.clear()

    def _exchange(self, gradients: list[torch.Tensor]) -> None:
        if LETS_GO_EARLY:
            self._sent.clear()
        precision, mesh = self._sharding.precision, self._sharding.mesh
        dtype = None if precision is None else precision.reduce_dtype
        row = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients), dtype=dtype or gradients[0].dtype)
        gradients.clear()
        self._sent.append(row)
        part = row.new_empty(row.numel() // mesh.size(mesh.ndim - 1))
        if row.device.type == "cpu":
            row.clone()  # in gloo
        if mesh.ndim > 1:  # then averaged over copies, which may go on while the next layer is exchanged
            self._averaged.append(part)


def exchanging(sharding: Sharding | None) -> Exchanges | None:
    """What is done in each backward; None where gradients are exchanged once an iteration, or not at all."""
    return None if sharding is None or sharding.zero_stage < 2 else Exchanges(sharding)
