"""What each stage does of a traced step: between which events it computes, what it receives and what it sends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.events import Event, New, Trace
from lightning_pfo.strategy.model.tracing.noticing import AppliedFunction
from lightning_pfo.strategy.model.tracing.tracked import Tracked


@dataclass(frozen=True)
class StageProgram:
    """A stage's part of a step.

    Attributes:
        events: The events of the whole step.
        start: The first event that it computes.
        stop: The event at which it ends; None: it runs to the end.
        received: Labels of the values that it begins with.
        sent: Labels of the values that it ends with.
        changed: Of what is received, what is changed in place later.
        forms: Of all values, by label.
        applies: Whether the step uses an `autograd.Function` of its own between units.
        draws: Whether the step draws random numbers between the events.
        compiled: The user's line that a compiled function has between units, if one has any.
        selects: Whether the values of the batch decide sizes of what stages send.
        changes: The stages whose values change a buffer (or parameter) of the user's module, by its name; None where
            the step changes it alike on all.
        divided: Events at which begins what is recomputed together on one device, but of which the stage has a part.
    """

    events: Sequence[Event] = field(repr=False)
    start: int
    stop: int | None
    received: tuple[int, ...]
    sent: tuple[int, ...]
    changed: frozenset[int]
    forms: Sequence[Tracked] = field(repr=False)
    applies: bool
    draws: bool
    compiled: str = ""
    divided: frozenset[int] = frozenset()
    selects: bool = False
    changes: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def patches(self) -> bool:
        """Whether something is patched while it runs."""
        return self.applies or bool(self.divided) or bool(self.compiled)


def programs_of(trace: Trace, cuts: Sequence[int]) -> list[StageProgram]:
    """Divide a step at some events.

    Args:
        trace: The step.
        cuts: The first event of each stage but the first, rising.

    Raises:
        ConfigurationError: If a value would have to cross a cut whose shape depends on values, or two values that share
            memory, of which one is changed in place afterwards.
    """
    positions = [0, *cuts]
    live = [tuple(trace.live(cut)) if stage else () for stage, cut in enumerate(positions)]
    changed_at: dict[int, int] = {}  # by memory: a change through one view changes all
    for value in trace.values:
        changed_at[value.memory] = max(changed_at.get(value.memory, -1), value.changed_at)
    for cut, labels in zip(positions[1:], live[1:], strict=True):
        _check(trace, cut, labels, changed_at)
    for event, line in trace.stale:
        if any(cut > event for cut in cuts):
            raise ConfigurationError(
                f"A tensor that the step has made itself is changed in place by what one stage computes, and used "
                f"through another view of it afterwards, which other stages do not see changed: {line} Change a tensor "
                f"made of stages' values instead (x = x.clone()), or use what was changed itself."
            )
    if cuts and any(event.what is torch.autograd.grad and None in event.results for event in trace.events):
        raise differentiates("torch.autograd.grad(..., allow_unused=True).", "it found no way between them")
    changes: dict[str, int | None] = dict.fromkeys(trace.changed_everywhere)
    changes |= {name: _stage_of_changes(trace, cuts, name) for name in trace.changes}
    forms = [value.form for value in trace.values]
    programs = []
    for stage, (start, stop) in enumerate(pairwise([*positions, None])):
        programs.append(
            StageProgram(
                trace.events,
                start or 0,
                stop,
                live[stage],
                live[stage + 1] if stop is not None else (),
                frozenset(label for label in live[stage] if changed_at[trace.values[label].memory] >= (start or 0)),
                forms,
                any(isinstance(event.what, AppliedFunction) for event in trace.events),
                trace.draws,
                trace.compiled,
                frozenset(first for first, behind in trace.recomputed if _is_divided(first, behind, start or 0, stop)),
                bool(cuts) and any(position <= cuts[-1] for position in trace.selects),
                changes,
            )
        )
    return programs


def differentiates(line: str, error: object) -> ConfigurationError:
    """What is said where a step differentiates by itself, over a stage boundary."""
    return ConfigurationError(
        f"torch.autograd.grad in a step can only differentiate what the same stage has computed, and here it asks for "
        f"the gradient by a tensor from before it ({error}): {line} Put all that is differentiated into one module, "
        f"and call torch.autograd.grad in its forward, so that one stage has both; or use one stage."
    )


def _stage_of_changes(trace: Trace, cuts: Sequence[int], name: str) -> int:
    """The stage that changes a buffer; others get its value after the iteration, so they must not use it before."""
    stage, line = max((bisect_right(cuts, event), line) for event, line in trace.changes[name])
    uses = [event for event, _ in trace.changes[name]]
    uses += [position for position, event in enumerate(trace.events) if name in event.held]
    earlier = min(bisect_right(cuts, position) for position in uses)
    if earlier < stage:
        raise ConfigurationError(
            f"{name!r} is changed by what stage {stage} computes, but used on stage {earlier} as well, which runs the "
            f"next microbatch before it knows of the change. {line} Move the boundary with partition='custom:...' so "
            f"that one stage does both, or use a copy that changes after the batch (on_train_batch_end)."
        )
    return stage


def _is_divided(first: int, behind: int, start: int, stop: int | None) -> bool:
    return first < start < behind or (stop is not None and first < stop < behind)


def _check(trace: Trace, cut: int, labels: Sequence[int], changed_at: Mapping[int, int]) -> None:
    by_memory: dict[int, int] = {}
    for label in labels:
        value = trace.values[label]
        if value.line:
            raise ConfigurationError(
                f"A value crosses the boundary between two stages whose shape depends on the values of tensors that "
                f"an earlier stage computes, so that the next stage cannot make room for it: {value.line} Move the "
                f"boundary with partition='custom:...', or keep the shape (e.g. with torch.where and zeros)."
            )
        other = by_memory.setdefault(value.memory, label)
        if other != label and changed_at[value.memory] >= cut:
            raise ConfigurationError(
                "Two tensors that share memory cross the boundary between two stages, and one of them is changed in "
                "place afterwards; the other would not change with it. Change a copy (x = x.clone()), or move the "
                "boundary with partition='custom:...'."
            )


Bound = list[tuple[str, frozenset[int]]]
"""What an event needs of what only some stages have: names of units, parameters and buffers, and these stages."""


def cuts_before(trace: Trace, positions: Sequence[int], bound: Sequence[Bound]) -> list[int]:
    """Where to cut so that the event at each position begins a stage: where the least has to be sent.

    Rather where no size depends on values, which cannot cross. Between the last unit with parameters before the
    position and the position itself.

    Args:
        trace: The step.
        positions: The first event of each stage but the first.
        bound: For each event what it needs.
    """
    cuts = []
    for stage, position in enumerate(positions, start=1):
        possible = _possible(trace, position)
        allowed = [
            cut
            for cut in possible
            if _all_have(bound[possible[0] : cut], stage - 1) and _all_have(bound[cut:position], stage)
        ]
        cuts.append(min(allowed or possible, key=lambda cut: (_num_varying(trace, cut), _bytes(trace, cut), -cut)))
    return cuts


def _all_have(bound: Sequence[Bound], stage: int) -> bool:
    return all(stage in stages for of_event in bound for _, stages in of_event)


def _possible(trace: Trace, position: int) -> range:
    first = position
    while first > 0 and not any(unit.num_parameters for unit in trace.events[first - 1].units):
        first -= 1
    return range(max(first, 1), position + 1)


def _num_varying(trace: Trace, cut: int) -> int:
    return sum(bool(trace.values[label].line) for label in trace.live(cut))


def _bytes(trace: Trace, cut: int) -> int:
    return sum(trace.values[label].num_bytes for label in trace.live(cut))


def cuts_by_owner(bound: Sequence[Bound], num_stages: int) -> list[int]:
    """Where to cut so that each stage has what it needs.

    Args:
        bound: For each event of a step, which may differ from that which the partition was made for, what it needs.
        num_stages: Number of stages.

    Raises:
        ConfigurationError: If what is needed leads back to an earlier stage.
    """
    cuts: list[int] = []
    previous = ""
    for position, of_event in enumerate(bound):
        for name, stages in of_event:
            if len(cuts) not in stages:
                later = [stage for stage in stages if stage > len(cuts)]
                if not later:
                    raise ConfigurationError(
                        f"Stages run one after the other, but {name!r}, which stage {max(stages)} has, is used after "
                        f"{previous!r}, which stage {len(cuts)} has. Call the model's parts in one order, or move the "
                        f"boundaries with partition='custom:...' so that one stage has both."
                    )
                cuts += [position] * (min(later) - len(cuts))
            previous = name
    return cuts + [len(bound)] * (num_stages - 1 - len(cuts))


# ---- where a loss of the whole batch begins ----
#
# Up to there samples are treated one by one, so that microbatches can be joined. Known from the forms of values alone,
# in the traces of a microbatch and of the whole batch: a value that grows with the number of samples in one dimension
# has them there in a row. One that does not grow (a mean), or grows in two dimensions (similarities of all pairs), has
# been made by comparing samples, or is the same for all.


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
