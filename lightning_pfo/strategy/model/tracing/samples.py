"""Up to where a step treats samples one by one: there microbatches can be joined, for a loss of the whole batch.

Known from the forms of values alone, in the traces of a microbatch and of the whole batch: a value that grows with the
number of samples in one dimension has them there in a row. One that does not grow (a mean), or grows in two dimensions
(similarities of all pairs), has been made by comparing samples, or is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.events import Event, New, Trace


def growing(part: Sequence[int], whole: Sequence[int]) -> list[int]:
    """The dimensions in which a value of the whole batch is larger than that of a microbatch.

    Args:
        part: The shape of the latter.
        whole: The shape of the former; of another number of dimensions, all of its dimensions count.
    """
    if len(part) != len(whole):
        return list(range(len(whole)))
    return [index for index, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]


def end_of_samples(part: Trace, whole: Trace, start: int) -> int:
    """The event before which the last stage can join the values of microbatches.

    After the last unit with parameters before samples are compared: what such units compute is nearly all of the work,
    and stays that of microbatches.

    Args:
        part: The step on a microbatch.
        whole: The step on the whole batch.
        start: The first event of the last stage.

    Raises:
        ConfigurationError: If the step does other things for the whole batch.
    """
    stop = next((i for i in range(start, len(part.events)) if _compares(part, whole, i)), len(part.events))
    while stop > start and not any(unit.num_parameters for unit in part.events[stop - 1].units):
        stop -= 1
    calls = [[event.what for event in trace.events[:stop]] for trace in (part, whole)]
    if calls[0] != calls[1] or part.live(stop) != whole.live(stop):
        raise ConfigurationError(
            "loss_over='batch' runs the end of the step on what all microbatches have come to, but for the whole batch "
            "the step calls other parts of the model than for a microbatch, or needs other values of them. Let the "
            "number of samples decide nothing, or leave loss_over='batch' out."
        )
    return stop


def _compares(part: Trace, whole: Trace, position: int) -> bool:
    """Whether an event makes a value of which samples have no part of their own."""
    if position >= len(whole.events):
        return True
    mine, other = _made(part.events[position]), _made(whole.events[position])
    return mine != other or any(
        len(growing(part.values[label].form.shape, whole.values[label].form.shape)) != 1 for label in mine
    )


def _made(event: Event) -> list[int]:
    return [leaf.label for leaf in event.results if isinstance(leaf, New)]
