"""The end of a step on the whole batch, between the forwards of microbatches and their backwards.

The forward of the last microbatch on the last stage runs it, forward and backward: that leaves each microbatch the
gradients of what it had come to, from where its own backward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import tree_leaves
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import SKIPPED
from lightning_pfo.strategy.model.tracing.stage_run import run_stage
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.programs import Programs, StepPrograms, Whole
from lightning_pfo.strategy.step.recording import skips_some
from lightning_pfo.strategy.step.whole.joining import Join, joins_of
from lightning_pfo.strategy.step.whole.order import RowOrder

Tensors = tuple[torch.Tensor, ...]
Take = Callable[[Any, int], torch.Tensor]
"""Takes what a step returned, and an index; returns the loss."""


class Ends:
    """Makes what runs the ends of steps, of each kind of step.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module.
        programs: Finds what stages do of a step.
        users: The stages that hold each parameter and buffer.
    """

    def __init__(
        self, engine: PipelineEngine, owner: nn.Module, programs: Programs, users: Mapping[str, frozenset[int]]
    ) -> None:
        self._engine = engine
        self._owner = owner
        self._order = RowOrder(engine, owner, programs, users)
        self._checked: set[str] = set()

    def of(
        self,
        kind: str,
        found: Sequence[StepPrograms],
        microbatches: Sequence[Any],
        whole: Whole,
        step: Callable[[int], Any],
        step_seed: tuple[int, ...],
        trying: Callable[[], AbstractContextManager[Any]],
        running: Callable[[], AbstractContextManager[Any]],
        take: Take,
    ) -> Take:
        """Make what takes the values that the last stage has of each microbatch; a collective call of the pipeline.

        Args:
            kind: Which step it is.
            found: What stages do of each microbatch.
            microbatches: The microbatches.
            whole: The whole batch.
            step: The user's step on the microbatch of an index.
            step_seed: Makes the random numbers of this step differ from those of others.
            trying: Makes a context in which the user's step runs and nothing is noted of it.
            running: Makes a context in which the user's step runs, and logs.
            take: Takes what the step returns.

        Raises:
            ConfigurationError: If values of microbatches cannot be joined.
        """
        program = found[0][1][-1]
        joins = joins_of([of_stages[-1] for of_stages, _ in found], program, whole.sizes)
        ordered = self._order.complete(kind, joins, microbatches, whole, step, step_seed)
        end = End(program, whole.step, self._engine.device, (self._engine.seed, *step_seed, len(microbatches)))

        def run(values: Tensors | None) -> Any:
            if values is None:
                with running():
                    return _skip(whole.step)
            if kind not in self._checked:
                self._checked.add(kind)
                with untouched(self._owner), trying():
                    end.check_draws(values)
            with running():
                return end.run(values)[0]

        return JoinedLoss(ordered, whole.sizes, run, take)


_NOTHING = StageProgram((), 0, 0, (), (), frozenset(), (), False, False)
"""Ends a step before it calls anything."""


def _skip(step: Callable[[], Any]) -> None:
    """Run a step on the whole batch, which is to return None like those on microbatches."""
    if run_stage(_NOTHING, step, ()) is not SKIPPED:
        raise ConfigurationError(
            "A training step that returns None skips the batch, so with loss_over='batch' it does so for the batch and "
            "for all microbatches; here it does not for the batch. Decide by what they have in common, such as "
            "batch_idx."
        )


@dataclass(frozen=True)
class End:
    """The end of a step on the whole batch.

    Attributes:
        program: What is left to do.
        step: The user's step on the whole batch; what comes before the end is left out.
        device: Where it runs.
        seed: What its random numbers derive from.
    """

    program: StageProgram
    step: Callable[[], Any]
    device: torch.device
    seed: tuple[int, ...]

    def run(self, values: Tensors, draw: int = 0) -> tuple[Any, bool]:
        """Run it on the values that it begins with; `draw` tells random numbers of the beginning apart.

        Returns:
            What the step returns, and whether it has drawn random numbers before its end.
        """
        random_state.seed(self.device, *self.seed, 1 + draw)
        before = random_state.get_state(self.device)
        draws = False

        def enter() -> None:
            nonlocal draws
            draws = not random_state.same_state(before, random_state.get_state(self.device))
            random_state.seed(self.device, *self.seed, 0)

        return run_stage(self.program, self.step, values, enter=enter), draws

    def check_draws(self, values: Tensors) -> None:
        """Run it with other random numbers before its end, if there are any, to see whether they make a difference.

        Raises:
            ConfigurationError: If they do: for the microbatches they were others.
        """
        first, draws = self.run(values)
        second = self.run(values, 1)[0] if draws else first
        pairs = zip(tree_leaves(first), tree_leaves(second), strict=True)
        if any(isinstance(a, torch.Tensor) and not torch.allclose(a, b, equal_nan=True) for a, b in pairs):
            raise ConfigurationError(
                "With loss_over='batch' the end of the step runs on the whole batch, and its beginning on "
                "microbatches: random numbers that the step itself draws in the beginning and needs in the end are not "
                "the same for both. Draw them in the dataset, in on_after_batch_transfer or in a submodule."
            )


class JoinedLoss:
    """Takes what the last stage has of each microbatch, in place of what a step returns.

    Args:
        joins: How each value is joined, in the order of the values.
        sizes: How many samples each microbatch has.
        run: Runs the end of the step on the joined values; None: the step has called nothing.
        take: Takes what the step returns.
    """

    def __init__(
        self, joins: Sequence[Join], sizes: Sequence[int], run: Callable[[Tensors | None], Any], take: Take
    ) -> None:
        self._joins = joins
        self._sizes = sizes
        self._run = run
        self._take = take
        self._values: dict[int, Tensors] = {}
        self._num_skipped = 0

    def __call__(self, values: Any, index: int) -> torch.Tensor:
        """Keep the values of a microbatch.

        Returns:
            What stands for its loss: of no value, its backward gives the gradients of the loss of the whole batch.
        """
        if values is None:
            self._num_skipped += 1
            if self._num_skipped == len(self._sizes):
                self._take(self._run(None), 0)
            self._check_all_skip()
            return torch.zeros(())
        leaves = self.add(values, index)
        self._check_all_skip()
        if len(self._values) == len(self._sizes):
            loss = self._take(self._run_on_all(), 0)
            if loss.requires_grad:
                with torch.autocast(loss.device.type, enabled=False):
                    torch.autograd.backward(loss)
            self._values.clear()
        stands_for: torch.Tensor = _PartOfLoss.apply(leaves, *values)  # type: ignore[no-untyped-call]
        return stands_for

    def _check_all_skip(self) -> None:
        if self._num_skipped and self._values:
            raise skips_some(self._num_skipped, len(self._sizes))

    def add(self, values: Tensors, index: int) -> Tensors:
        """Keep the values of a microbatch; returns what will have their gradients."""
        self._values[index] = tuple(value.detach().requires_grad_(value.requires_grad) for value in values)
        return self._values[index]

    def _run_on_all(self) -> Any:
        columns = zip(*(self._values[index] for index in range(len(self._sizes))), strict=True)
        values = [join(column, self._sizes) for join, column in zip(self._joins, columns, strict=True)]
        return self._run(tuple(values))


class _PartOfLoss(torch.autograd.Function):
    """No value, whose backward gives the gradients that the loss of the whole batch has left with leaves."""

    @staticmethod
    def forward(ctx: Any, leaves: Tensors, *values: torch.Tensor) -> torch.Tensor:
        ctx.leaves = leaves
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *(leaf.grad for leaf in ctx.leaves))
