"""Steps that optimize several times in a batch: each of their phases is run on the pipeline, one after the other.

What a step logs, returns and leaves behind is that of its last phase, which runs the step to its end; of those before
only gradients count, what the step then does with them, and the values that later phases need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from lightning_pfo.strategy.engine.executor import AfterBackward
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.effects.outward.calls import merged_calls
from lightning_pfo.strategy.step.effects.outward.noted import Call
from lightning_pfo.strategy.step.gradients import loss_of, to_be_differentiated
from lightning_pfo.strategy.step.on_stages import StepOnStages
from lightning_pfo.strategy.step.outcome import StepOnBatch
from lightning_pfo.strategy.step.programs import Phases
from lightning_pfo.strategy.step.recording import LogRecorder
from lightning_pfo.strategy.step.values import ValueExchange


class Between(Protocol):
    """What a step does after a phase."""

    def noted(self) -> list[list[Call]]:
        """The calls of each microbatch in the phase that has run, where steps run to their end."""

    def act(self, loss: torch.Tensor | None, calls: Sequence[Call]) -> None:
        """Do what the step does after a phase, on every rank.

        Args:
            loss: The loss of the batch in it, whose backward hands out gradients.
            calls: What it does.
        """


class PhaseRunner:
    """Runs the phases of steps before the last one.

    Args:
        runner: Runs steps on the pipeline.
        divided: Whether layers are divided over replicas.
    """

    def __init__(self, runner: StepOnStages, *, divided: bool) -> None:
        self._runner = runner
        self._divided = divided
        self._exchanges: dict[Any, ValueExchange] = {}

    def find(self, of: StepOnBatch) -> list[StepOnBatch]:
        """The phases of a training step; a step that does not optimize several times is one."""
        engine = self._runner.engine
        with random_state.isolated(engine.device):
            found: list[Phases] = self._runner.programs.of_phases(
                of.kind, of.parts, of.of_microbatch, (engine.seed, *of.seed), train=True
            )
        number = len(found[0])
        memory: list[dict[int, torch.Tensor]] = [{} for _ in of.parts]
        return [
            replace(
                of, programs=[phases[index] for phases in found], memory=memory, phase=index, ends=index == number - 1
            )
            for index in range(number)
        ]

    def run(
        self,
        of: StepOnBatch,
        loss_scale: torch.Tensor | None,
        after_backward: AfterBackward,
        between: Between,
    ) -> dict[str, Any]:
        """Run a phase that is not the last one; a collective call.

        Args:
            of: The phase.
            loss_scale: What the loss is multiplied with during backward.
            after_backward: Called after each backward of this rank.
            between: Knows what the step does after the phase.

        Returns:
            The loss of the batch, and what the step does.
        """
        runner, parts = self._runner, of.parts
        weights = runner.rules.weights(of.source, parts.parts, parts.sizes) if runner.engine.is_last else ()
        recorder = LogRecorder(runner.owner, weights, parts.sizes)
        losses: list[torch.Tensor] = []

        def take(result: Any, index: int) -> torch.Tensor:
            loss = loss_of(result)
            losses.append(loss.detach())
            return to_be_differentiated(loss, weights[index], loss_scale, runs_backward=self._divided)

        outcome: dict[str, Any] = {}
        error: Exception | None = None
        try:
            runner.run(
                of.kind, of.of_microbatch, parts, of.seed, recorder, take, after_backward=after_backward, phase=of
            )
            if runner.engine.is_last:
                outcome["calls"] = merged_calls(between.noted(), parts.sizes, weights)
                outcome["loss"] = recorder.mean_loss(losses)
        except Exception as exception:
            error = exception
        shared: dict[str, Any] = self._exchange(of.phase, "outcome", runner.engine.last_rank).share(outcome, error)
        self._share_values(of)
        return shared

    def _share_values(self, of: StepOnBatch) -> None:
        """Give all ranks the values that later phases need."""
        engine = self._runner.engine
        assert of.programs is not None
        if engine.num_ranks == 1:
            return
        kept_by: dict[int, list[frozenset[int]]] = {}
        for stages, _ in of.programs:
            kept: dict[int, frozenset[int]] = {}
            for stage, program in enumerate(stages):
                rank = engine.placement[stage]
                kept[rank] = kept.get(rank, frozenset()) | program.kept
            for rank, labels in kept.items():
                kept_by.setdefault(rank, []).append(labels)
        for rank in sorted(kept_by):
            if not any(kept_by[rank]):
                continue
            mine: list[dict[int, torch.Tensor]] = []
            if engine.rank == rank:
                pairs = zip(of.memory, kept_by[rank], strict=True)
                mine = [{label: memory[label] for label in sorted(labels)} for memory, labels in pairs]
            for memory, values in zip(of.memory, self._exchange(of.phase, "values", rank).share(mine), strict=True):
                memory.update(values)

    def _exchange(self, phase: int, what: str, rank: int) -> ValueExchange:
        """What sends something from a rank to all; one of each, as it remembers what comes alike each time."""
        engine, key = self._runner.engine, (phase, what, rank)
        if key not in self._exchanges:
            self._exchanges[key] = ValueExchange(engine.device, engine.group, engine.host_group(), rank)
        return self._exchanges[key]
