"""What is known of what steps leave: rules of their values, found by comparing them with traces of the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from lightning_pfo.strategy.step.batches.batching import Batching
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.left import learn
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch, StepRun
from lightning_pfo.strategy.step.programs import Programs


class KnownRules:
    """Rules of the values that each kind of step leaves with the batches of each loader.

    Args:
        programs: Traces steps.
        batching: How batches are divided.
    """

    def __init__(self, programs: Programs, batching: Batching) -> None:
        self._programs = programs
        self._batching = batching
        self._rules: dict[Source, Rules] = {}

    def of(self, source: Source) -> Rules:
        """What is known of what a kind of step leaves with the batches of a loader."""
        return self._rules.setdefault(source, Rules())

    @contextmanager
    def looking(self, of: StepOnBatch, run: StepRun, seed: int) -> Iterator[Rules]:
        """Compare what a step has left with traces of it, where rules are asked while the context is open.

        Args:
            of: The step.
            run: What has come of it.
            seed: That of the whole run.
        """
        rules, seeds = self.of(of.source), (seed, *of.seed, 0)
        batching, parts = self._batching, of.parts

        def look() -> None:
            small, large = (
                self._programs.left_by(partial(of.step, part, *of.rest), seeds, train=run.train)
                for part in (parts[0], batching.first_parts(of.batch, parts, 2))
            )
            if small is not None and large is not None:
                learn(rules, run.left(0), run.left(1), small, large)

        # the user's own way of splitting does not tell which samples the first microbatches have
        is_told = not batching.joins_microbatches and len(parts) > 1 and batching.split_batch is None
        with rules.comparing(look if is_told else None):
            yield rules
