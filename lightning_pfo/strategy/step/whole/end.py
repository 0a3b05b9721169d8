"""The end of a step on the whole batch, between the forwards of microbatches and their backwards.

The forward of the last microbatch on the last stage runs it, and the first backward goes back through it: that leaves
each microbatch the gradients of what it had come to, from where its own backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.noticing import users_line
from lightning_pfo.strategy.model.tracing.program import StageProgram
from lightning_pfo.strategy.model.tracing.stage_run import run_stage
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.whole.joining import Join

Tensors = tuple[torch.Tensor, ...]


class EndOfStep:
    """Takes what the last stage has of each microbatch, in place of what a step returns.

    Args:
        joins: How each value is joined, in the order of the values.
        sizes: How many samples each microbatch has.
        run: Runs the end of the step on the joined values; returns what the step does, or the error that it raised.
        take: Takes that; returns the loss.
    """

    def __init__(
        self,
        joins: Sequence[Join],
        sizes: Sequence[int],
        run: Callable[[Tensors], Any],
        take: Callable[[Any, int], torch.Tensor],
    ) -> None:
        self._joins = joins
        self._sizes = sizes
        self._run = run
        self._take = take
        self._values: dict[int, Tensors] = {}
        self._failed = False
        self._loss: torch.Tensor | None = None

    def __call__(self, values: Any, index: int) -> torch.Tensor:
        """Keep the values of a microbatch (or the error of its forward).

        Returns:
            What stands for its loss: of no value, its backward gives the gradients of the loss of the whole batch.
        """
        if isinstance(values, Exception):
            self._failed = True
            return self._take(values, 0)
        self._values[index] = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        if len(self._values) == len(self._sizes) and not self._failed:
            self._loss = self._take(self._run_on_all(), 0)
        if not torch.is_grad_enabled():
            return torch.zeros(())
        # the end may have parameters of its own, so there is always something to go back to
        stands_for: torch.Tensor = _PartOfLoss.apply(torch.zeros((), requires_grad=True), self, index, *values)  # type: ignore[no-untyped-call]
        return stands_for

    def gradients(self, index: int) -> list[torch.Tensor | None]:
        """The gradients of the loss by the values of a microbatch."""
        loss, self._loss = self._loss, None
        if loss is not None and loss.requires_grad:
            with torch.enable_grad():
                torch.autograd.backward(loss)
        return [value.grad for value in self._values[index]]

    def _run_on_all(self) -> Any:
        rows: Mapping[int, Tensors] = self._values
        columns = zip(*(rows[index] for index in range(len(self._sizes))), strict=True)
        try:
            return self._run(
                tuple(join(column, self._sizes) for join, column in zip(self._joins, columns, strict=True))
            )
        except Exception as error:  # told to all ranks when the iteration is finished
            return error


def run_end_of_step(
    program: StageProgram,
    step: Callable[[], Any],
    values: Sequence[torch.Tensor],
    device: torch.device,
    seed: tuple[int, ...],
) -> Any:
    """Run the end of a step on the whole batch.

    Args:
        program: What is left to do.
        step: The user's step on the whole batch; what comes before the end is left out.
        values: What the end begins with.
        device: Where it runs.
        seed: What its random numbers derive from.

    Raises:
        ConfigurationError: If the step has drawn random numbers before its end: for microbatches they were others.
    """
    random_state.seed(device, *seed)
    before = random_state.get_state(device)

    def check_nothing_drawn() -> None:
        if not random_state.same_state(before, random_state.get_state(device)):
            raise ConfigurationError(
                f"With loss_over='batch' the end of the step runs on the whole batch, and its beginning on "
                f"microbatches: random numbers that the step draws between are not the same for both. The end begins "
                f"at {users_line()} Draw them in the dataset, in on_after_batch_transfer or in a submodule."
            )

    return run_stage(program, step, values, enter=check_nothing_drawn)


class _PartOfLoss(torch.autograd.Function):
    """No value, whose backward gives the gradients of the loss of the whole batch."""

    @staticmethod
    def forward(ctx: Any, handle: torch.Tensor, end: EndOfStep, index: int, *values: torch.Tensor) -> torch.Tensor:
        ctx.end, ctx.index = end, index
        return torch.zeros_like(handle)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, None, *ctx.end.gradients(ctx.index))
