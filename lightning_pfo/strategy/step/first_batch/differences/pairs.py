"""A batch that was run twice, by microbatches and in one piece, and its losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_pfo.strategy.step.first_batch.differences.losses import Losses, differ
from lightning_pfo.strategy.step.outcome import StepRun, loss_in


@dataclass(frozen=True)
class Pair:
    """A batch that was run by microbatches and in one piece, by one draw of random numbers."""

    parts: StepRun
    whole: StepRun


def losses_of(pair: Pair) -> Losses:
    """The losses of a training batch."""
    of_parts, (of_all,) = ([float(loss_in(result)) for result in run.results] for run in (pair.parts, pair.whole))
    weights = pair.parts.recorder.weights if len(of_parts) > 1 else ()
    return Losses(tuple(of_parts), of_all, tuple(weights))


def are_other(pairs: Sequence[Pair], *, tolerance: float) -> bool:
    """Whether losses differ by more than rounding and chance; not where nothing was run."""
    return bool(pairs) and differ(list(map(losses_of, pairs)), tolerance)


def how_other(pairs: Sequence[Pair], tolerances: Sequence[float]) -> int:
    """How many tolerances losses differ by more than."""
    return sum(are_other(pairs, tolerance=each) for each in tolerances)
