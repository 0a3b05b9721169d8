"""In which order rows lie that each sample has several of, found once for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.buffers import StepBuffers
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.step.programs import Programs, Whole, changes_on_the_way
from lightning_pfo.strategy.step.tracing import logs_noted
from lightning_pfo.strategy.step.whole.joining import Join, find_blocks, joins_of


class RowOrder:
    """Runs the stages on the whole batch, where forms do not tell the order of rows.

    Forward only, in evaluation mode, without gradients, by microbatches and in one piece; nothing remains of it.

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
        self._programs = programs
        self._users = users
        self._known: dict[tuple[str, int, Join], int] = {}

    def complete(
        self,
        kind: str,
        joins: Mapping[int, Join],
        microbatches: Sequence[Any],
        whole: Whole,
        step: Callable[[int], Any],
        step_seed: tuple[int, ...],
    ) -> list[Join]:
        """How each value is joined, with the order of its rows; a collective call of the pipeline's ranks.

        Args:
            kind: Which step it is.
            joins: How values are joined, as far as is known.
            microbatches: The microbatches.
            whole: The whole batch.
            step: The user's step on the microbatch of an index.
            step_seed: What the random numbers of this step derive from.

        Raises:
            ConfigurationError: On every rank, if the order cannot be told.
        """
        open_ = [(kind, label, join) for label, join in joins.items() if join.blocks is None]
        if any(key not in self._known for key in open_):
            found, problem = self._compare(microbatches, whole, step, step_seed)
            if not problem and any(label not in found for _, label, _ in open_):
                problem = "loss_over='batch' needs a step that calls the same in evaluation mode as in training."
            if problem:
                raise ConfigurationError(problem)
            self._known |= {(kind, label, join): found[label] for kind, label, join in open_}
        return [
            replace(join, blocks=self._known[kind, label, join]) if join.blocks is None else join
            for label, join in joins.items()
        ]

    def _compare(
        self, microbatches: Sequence[Any], whole: Whole, step: Callable[[int], Any], step_seed: tuple[int, ...]
    ) -> tuple[dict[int, int], str]:
        engine, number = self._engine, len(microbatches)
        values: list[dict[int, torch.Tensor]] = []
        problem = ""

        def run_step(stage: int, index: int) -> Any:
            with buffers.of(stage), logs_noted(self._owner):
                return step(index) if index < number else whole.step()

        def take(result: Any, index: int) -> torch.Tensor:
            values.append(dict(zip(end.received, result, strict=True)))
            return torch.zeros(())

        with torch.no_grad(), untouched(self._owner):
            for module in self._owner.modules():
                module.training = False
            seed = (engine.seed, *step_seed)
            programs = self._programs.of("order", microbatches, step, seed, train=False, whole=whole)
            *of_whole, end = programs[0][1]
            of_parts = [found for found, _ in programs]
            changes: dict[str, int | None] = {}
            for _, each in programs:
                changes |= changes_on_the_way(each, engine.num_stages - 1, self._owner)
            buffers = StepBuffers(self._owner, changes, len(engine.stages), self._users)  # a teacher that follows
            try:
                engine.run([*of_parts, of_whole], step_seed, run_step, take, train=False)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            finally:
                buffers.put_back()
        found: dict[int, int] = {}
        if engine.is_last and not problem:
            try:  # whatever it is, the others wait to be told
                joins = joins_of([of_stages[-1] for of_stages in of_parts], end, whole.sizes)
                found = find_blocks(joins, values[:number], values[number], whole.sizes)
            except Exception as error:
                problem = str(error)
        everyone: list[tuple[dict[int, int], str]] = engine.all_gather((found, problem))
        return everyone[engine.last_rank][0], next((said for _, said in everyone if said), "")
