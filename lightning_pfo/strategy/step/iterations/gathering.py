"""Iterations of training: listeners hear of them, and their gradients are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.parallel.buckets import ReplicaMeans
from lightning_pfo.strategy.parallel.groups import Shared
from lightning_pfo.strategy.parallel.reductions import Gradients
from lightning_pfo.strategy.step.effects.layers.watch import LayerWatch
from lightning_pfo.strategy.step.gradients import (
    StepGradients,
    put_gradients,
    take_gradients,
    without_hooks,
)
from lightning_pfo.strategy.step.outcome import StepOnBatch


class Iterations:
    """Begins and ends iterations.

    Args:
        engine: The pipeline engine of this rank.
        parameters: Parameters of each stage of this rank; one of several stages is of that which ends last.
        shared: Parameters and buffers that this rank holds together with others.
        means: Averages gradients over replicas; None where there is one.
        layers: Looks at layers after the first iterations.
        precise: Whether gradients of microbatches are added up in 32 bits where parameters have 16.
    """

    def __init__(
        self,
        engine: PipelineEngine,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        shared: Sequence[Shared],
        means: ReplicaMeans | None,
        layers: LayerWatch,
        *,
        precise: bool,
    ) -> None:
        self._engine = engine
        self._parameters_of = parameters
        self._parameters = [parameter for of_stage in parameters.values() for parameter in of_stage]
        self._shared = shared
        self._means = means
        self._layers = layers
        self._precise = precise

    @contextmanager
    def gathering(self, of: StepOnBatch, *, average: bool, keeps: bool = True) -> Iterator[StepGradients]:
        """Gather gradients while the context is open; those of earlier iterations are set aside meanwhile.

        Args:
            of: What is run.
            average: Whether they are averaged over replicas.
            keeps: Whether those of earlier iterations are kept.
        """
        if self._is_ordinary(of):
            self._engine.iteration_begin()
        earlier = take_gradients(self._parameters)
        if not keeps:
            earlier = {}
        try:
            with without_hooks(self._parameters):
                yield StepGradients(self._parameters_of, self._means if average else None, precise=self._precise)
        except BaseException:
            if self._means is not None:
                self._means.forget()
            raise
        finally:
            put_gradients(self._parameters, earlier)

    def finish(self, of: StepOnBatch, gathered: StepGradients) -> Gradients:
        """The pipeline has run; returns all gradients."""
        if self._is_ordinary(of):
            self._engine.iteration_end()
        self._layers.look()
        return gathered.finish(self._shared)

    def _is_ordinary(self, of: StepOnBatch) -> bool:
        """Whether it has as many microbatches as others, so that listeners hear of it."""
        return self._engine.schedule is not None and len(of.parts) == self._engine.schedule.num_microbatches
