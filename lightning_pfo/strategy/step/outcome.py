"""What one run of a step by microbatches has come to, on the rank where it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.model.reach.places import named
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.batches.splitting import Microbatches
from lightning_pfo.strategy.step.batches.structures import leaves_of
from lightning_pfo.strategy.step.effects.effects import Effects
from lightning_pfo.strategy.step.effects.left import Left, beside_loss, place_of_log
from lightning_pfo.strategy.step.effects.outward.calls import arguments_of, place_of
from lightning_pfo.strategy.step.effects.rows import RowsLeft
from lightning_pfo.strategy.step.metrics.compat import BATCH_VALUE
from lightning_pfo.strategy.step.metrics.running import running_in
from lightning_pfo.strategy.step.metrics.totals import changed_totals, totals_in
from lightning_pfo.strategy.step.programs import StepPrograms
from lightning_pfo.strategy.step.recording import LogRecorder

Numbers = dict[str, torch.Tensor]
"""Numbers and tensors of them by their places, as `rules` call these; in 64 bits, on the CPU."""
_LARGEST = 2**22
"""Larger tensors are not compared."""
Source = tuple[str, int]
"""A kind of step, and which of several loaders its batches are of: steps may return other things for each."""


@dataclass(frozen=True)
class StepOnBatch:
    """A step that is to be run.

    Attributes:
        kind: Which step it is.
        step: The user's step.
        parts: The microbatches.
        seed: Makes the random numbers of this step differ from those of others.
        batch: The batch.
        rest: The other arguments of the step.
        programs: What stages do of each microbatch, in a phase of the step; None: nobody has looked yet.
        memory: Of each microbatch the values that phases of the step have computed for later ones.
        phase: Which phase of the step it is.
        ends: Whether it is the last phase, which runs the step to its end.
        is_of_phases: Whether it is the whole of a step that has several, which is run forward only.
        loader: Which of several loaders the batch is of.
        rows: What the batch before has left in rows.
        by_units: Whether all ranks run it in one piece, unit by unit; else stages do.
    """

    kind: str
    step: Callable[..., Any]
    parts: Microbatches
    seed: tuple[int, ...]
    batch: Any
    rest: Any
    programs: list[StepPrograms] | None = None
    memory: Sequence[dict[int, torch.Tensor]] = ()
    phase: int = 0
    ends: bool = True
    is_of_phases: bool = False
    loader: int = 0
    rows: RowsLeft = field(default_factory=RowsLeft)
    by_units: bool = False

    @property
    def source(self) -> Source:
        """What is known of it is known of others with the same."""
        return self.kind, self.loader

    def of_microbatch(self, index: int) -> Any:
        """Run the step on a microbatch."""
        return self.of_part(self.parts, index)

    def of_part(self, parts: Microbatches, index: int) -> Any:
        """Run the step on one of some parts of the batch, which are its first samples."""
        if not self.rows.are_divided:
            return self.step(parts[index], *self.rest)
        with self.rows.of_samples(sum(parts.sizes[:index]), parts.sizes[index], self.parts.size):
            return self.step(parts[index], *self.rest)


@dataclass(frozen=True)
class StepRun:
    """A step that was run.

    Attributes:
        effects: What it has left behind.
        recorder: What it has logged.
        results: What it has returned for each microbatch.
        train: Whether it is a training step, which returns a loss.
        batch_dim: The dimension along which tensors have samples.
        computed: What metrics say then, where that was asked.
    """

    effects: Effects
    recorder: LogRecorder
    results: list[Any]
    train: bool
    batch_dim: int
    computed: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def merged(self, rules: Rules, *, is_sent: bool) -> dict[str, Any]:
        """What comes of the batch, put together by rules.

        Args:
            rules: What is known of values at the same place.
            is_sent: Whether other ranks get it.
        """
        recorder = self.recorder
        outcome = self.effects.outcome(recorder.sizes, recorder.weights, rules, is_sent=is_sent)
        said = recorder.said.counts(len(recorder.sizes), self.effects.told)
        totals = totals_in(self.effects.changes, outcome["changes"], self.effects.value_at, said)
        outcome["changes"] |= changed_totals(self.effects.changes, outcome["changes"], totals, rules)
        outcome["changes"] |= running_in(
            self.effects.changes, outcome["changes"], self.effects.value_at, recorder.sizes, rules
        )
        outcome["logged"] = [tuple(logged) for logged in recorder.logged(rules, totals, self.effects.told)]
        return outcome | recorder.output(self.results, rules, train=self.train, batch_dim=self.batch_dim)

    def left(self, index: int) -> Left:
        """What a microbatch has left."""
        effects, recorder = self.effects, self.recorder
        return Left(self.results[index], effects.growth(index), effects.calls(index), recorder.values_of(index))

    def numbers(self, rules: Rules) -> Numbers:
        """All numbers of the batch, put together by rules."""
        outcome = self.merged(rules, is_sent=False)
        logged = zip(self.recorder.values, outcome["logged"], strict=True)
        return _numbers_in(
            {
                **self._left_in(outcome),
                **{place_of_log(*key): value for key, (*_, value) in logged if self.recorder.is_looked_at(key)},
                **{place_of(index, call): arguments_of(call) for index, call in enumerate(outcome["calls"])},
                **self.computed,
            }
        )

    def texts(self, rules: Rules) -> dict[str, Any]:
        """What is no number of what the batch leaves and returns, by its place: texts, paths, sets of them and None."""
        left = self._left_in(self.merged(rules, is_sent=False))
        return {path: leaf for place, value in left.items() for path, leaf in _leaves(value, place) if _is_text(leaf)}

    def _left_in(self, outcome: dict[str, Any]) -> dict[str, Any]:
        """What an outcome leaves and returns; what a metric object has of the batch counts where it is logged."""
        changes = {path: change for path, change in outcome["changes"].items() if path[-1] != BATCH_VALUE}
        return {**self.effects.growth_in(changes), "output": outcome["output"]}

    def zeros(self) -> set[str]:
        """Where numbers were 0 that a microbatch has changed: they are 0 still where another has not."""
        paths = {path for changes in self.effects.changes for path in changes}
        values = ((path, self.effects.value_at(path)) for path in paths)
        return {named(path) for path, value in values if type(value) in (int, float) and not value}

    def numbers_of(self, index: int) -> Numbers:
        """Those of a microbatch."""
        left = self.left(index)
        return _numbers_in(
            {
                **left.growth,
                **left.logged_by_place(),
                **{place_of(index, call): arguments_of(call) for index, call in enumerate(left.calls)},
                "output": beside_loss(left.output),
            }
        )


def _numbers_in(values: dict[str, Any]) -> Numbers:
    found: Numbers = {}
    for place, value in values.items():
        for path, leaf in leaves_of(value, place):
            number = _as_number(leaf)
            if number is not None:
                found[path] = number
    return found


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a value, with the items of arrays that hold no numbers."""
    for path, leaf in leaves_of(value, place):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "USO":
            yield from leaves_of(leaf.tolist(), path)
        else:
            yield path, leaf


def _is_text(leaf: Any) -> bool:
    if isinstance(leaf, (set, frozenset)):
        return all(type(item) is int or _is_text(item) for item in leaf)
    return leaf is None or isinstance(leaf, (str, bytes, PurePath, Enum))


def _as_number(leaf: Any) -> torch.Tensor | None:
    if not isinstance(leaf, (int, float, np.number, np.bool_, np.ndarray, torch.Tensor)):
        return None
    if isinstance(leaf, np.ndarray) and leaf.dtype.kind not in "iufb":
        return None
    if isinstance(leaf, torch.Tensor) and (leaf.layout != torch.strided or leaf.is_nested or leaf.is_complex()):
        return None
    try:
        number = torch.as_tensor(leaf)
        return number.detach().to("cpu", torch.float64) if number.numel() <= _LARGEST else None
    except Exception:  # an integer that is too large, a tensor of another kind
        return None


def loss_in(result: Any) -> Any:
    """The loss in what a training step returns."""
    return result["loss"] if isinstance(result, Mapping) else result
