"""What each stage does of a traced step: between which events it computes, what it receives and what it sends."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.dividing.cutting import Obstacles
from lightning_pfo.strategy.model.tracing.dividing.flow import StageOf, last_stage
from lightning_pfo.strategy.model.tracing.dividing.phases import Phase
from lightning_pfo.strategy.model.tracing.dividing.undifferentiated import undifferentiated
from lightning_pfo.strategy.model.tracing.events import Event, New, Trace
from lightning_pfo.strategy.model.tracing.forms.values import strides_of
from lightning_pfo.strategy.model.tracing.noticing.applied import AppliedFunction
from lightning_pfo.strategy.model.tracing.tracked import Tracked
from lightning_pfo.strategy.model.variables import told_of_error

Counts = tuple[tuple[str, int], ...]
"""How often units are called, by name."""


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
        varying: Of all values, those whose shape may be another for each microbatch.
        asked: Of those with one shape, the ones that Python asks for it, maybe on other stages.
        others: Events between the first and the last that it computes which other stages compute, or earlier phases.
        imported: Labels of the values that earlier phases of the step have computed.
        kept: Labels of those that it computes for later phases.
        begin: The first event of its phase; those before are computed again.
        is_phase: Whether the step has other phases too.
        is_last: Whether it is the last stage.
        failure: What ended the trace of the step early, and the line, if something did.
        switches: Plain attributes of modules that the step itself sets and sets back.
        weights: Parameters that are followed, as attributes of modules: what takes one by itself is an event.
        undifferentiated: Labels of the values that the loss does not depend on, though their forms have gradients.
        received_before: Of what is received, what gets its gradients later, from something that is written into it.
        sent_before: The same of what is sent.
        contents: What values are told apart by on all ranks alike, by label; see `noticing.content`.
        differentiated: Labels of the values that have had gradients in some iteration, on the stage that received them.
        lacks: Whether units that it has called are on another rank.
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
    varying: frozenset[int] = frozenset()
    asked: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()
    imported: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    begin: int = 0
    is_phase: bool = False
    is_last: bool = False
    failure: str = ""
    switches: Sequence[tuple[nn.Module, str]] = ()
    weights: Sequence[tuple[nn.Module, str]] = ()
    undifferentiated: frozenset[int] = frozenset()
    received_before: frozenset[int] = frozenset()
    sent_before: frozenset[int] = frozenset()
    contents: Sequence[int] = field(default=(), repr=False)
    differentiated: set[int] = field(default_factory=set, repr=False, compare=False)
    lacks: dict[Any, bool] = field(default_factory=dict, repr=False, compare=False)

    def is_differentiable(self, label: int, *, sent: bool) -> bool:
        """Whether a value that is sent, or received, may have a gradient by then."""
        return label in self._differentiable and label not in (self.sent_before if sent else self.received_before)

    def has_gradient(self, label: int, *, sent: bool) -> bool:
        """Whether the gradient of a value that is sent, or received, comes back."""
        return self.is_differentiable(label, sent=sent) and label not in self.undifferentiated

    @cached_property
    def _differentiable(self) -> frozenset[int]:
        labels = {*self.received, *self.sent}  # forms take long to tell theirs
        return frozenset(label for label in labels if self.forms[label].requires_grad)

    @cached_property
    def strides(self) -> dict[int, tuple[int, ...]]:
        """How what it receives lies in memory where it is computed, if not as new tensors do."""
        found = {label: strides_of(self.forms[label]) for label in self.received if label not in self.varying}
        return {label: strides for label, strides in found.items() if strides is not None}

    @cached_property
    def units_called(self) -> Counts:
        """How often the whole step calls units."""
        return tuple(sorted(Counter(unit.name for event in self.events for unit in event.units).items()))

    def by_content(self, *, received: bool, sent: bool) -> StageProgram:
        """The same with what it receives, or sends, in an order that all ranks have, whatever they call first."""
        return replace(
            self,
            received=tuple(sorted(self.received, key=self.contents.__getitem__)) if received else self.received,
            sent=tuple(sorted(self.sent, key=self.contents.__getitem__)) if sent else self.sent,
        )

    @property
    def computed(self) -> list[Event]:
        """The events that it computes."""
        stop = len(self.events) if self.stop is None else self.stop
        return [self.events[position] for position in range(self.start, stop) if position not in self.others]

    @cached_property
    def restless(self) -> list[nn.Module]:
        """The units that change buffers of their own, where one of these may be what it sends."""
        if all(self.forms[label].requires_grad for label in self.sent):
            return []
        return [unit.module for event in self.computed if event.changes_state for unit in event.units]

    @cached_property
    def writing(self) -> list[tuple[nn.Module, tuple[str, ...]]]:
        """The units that write into parameters of their own, and the names of these."""
        writing = (event for event in self.computed if event.changes_weights)
        return [(unit.module, event.changes_weights) for event in writing for unit in event.units]

    @property
    def ends_early(self) -> bool:
        """Whether nothing is sent because it ends a phase of a step, and not the step."""
        return self.is_phase and self.stop is not None and self.is_last

    @property
    def patches(self) -> bool:
        """Whether something is patched while it runs."""
        return self.applies or bool(self.divided or self.compiled or self.weights)


def programs_of(trace: Trace, cuts: Sequence[int]) -> list[StageProgram]:
    """Divide a step at some events.

    Args:
        trace: The step.
        cuts: The first event of each stage but the first, rising.

    Raises:
        ConfigurationError: If it cannot be cut there; see `cutting`.
    """
    check_cuts(trace, cuts)
    return programs_by_stage(trace, stages_between(trace, cuts), len(cuts) + 1)


def stages_between(trace: Trace, cuts: Sequence[int]) -> dict[int, int]:
    """The stage of each event of a step that is cut before some of them."""
    return {position: bisect_right(cuts, position) for position in range(len(trace.events))}


def check_cuts(trace: Trace, cuts: Sequence[int]) -> None:
    """Check that nothing stands against cutting a step at some events.

    Raises:
        ConfigurationError: If something does; see `cutting`.
    """
    obstacles = Obstacles(trace)
    for cut in cuts:
        if refusal := obstacles.refusal(cut):
            raise ConfigurationError(refusal)


def programs_by_stage(
    trace: Trace, stage_of: StageOf, num_stages: int, phase: Phase | None = None
) -> list[StageProgram]:
    """Divide a step, or a phase of it, whose events are given to stages.

    Args:
        trace: The step.
        stage_of: The stages of the events that are computed.
        num_stages: Number of stages.
        phase: What the phase computes; None: the step has no phases.
    """
    last = num_stages - 1
    stop = None if phase is None else phase.stop
    end = len(trace.events) if stop is None else stop
    imported: frozenset[int] = frozenset() if phase is None else phase.imported
    # of each value that some stage computes: where, and the last one that needs it
    spans = {
        label: (stage_of[value.born], last_stage(value, stage_of, last))
        for label, value in enumerate(trace.values)
        if value.born in stage_of and label not in imported
    }
    changed_at = trace.last_changes()
    changes: dict[str, int | None] = dict.fromkeys(trace.changed_everywhere)
    for name, of_name in trace.changes.items():  # others get its value after the iteration
        of_phase = [stage_of[event] for event, _ in of_name if event in stage_of]
        if of_phase or phase is None:
            changes[name] = max(of_phase, default=0)
    forms = [value.form for value in trace.values]
    varying = frozenset(label for label, value in enumerate(trace.values) if value.varies)
    live = [
        tuple(label for label, (born, needed) in spans.items() if born < stage <= needed) for stage in range(num_stages)
    ]
    without_gradients = undifferentiated(trace)
    failure = "" if trace.failure is None else told_of_error(trace.failure)
    before = [
        frozenset(
            label
            for label in live[stage]
            if (position := trace.values[label].gradient_from) >= 0 and stage_of.get(position, -1) >= stage
        )
        for stage in range(num_stages)
    ]
    programs = []
    for stage in range(num_stages):
        mine = {position for position, of in stage_of.items() if of == stage}
        is_last = stage == last
        start = min(mine, default=end if is_last else 0)
        stops = end if is_last else max(mine, default=-1) + 1
        programs.append(
            StageProgram(
                trace.events,
                start,
                stop if is_last else stops,
                live[stage],
                () if is_last else live[stage + 1],
                frozenset(label for label in live[stage] if changed_at[trace.values[label].memory] >= start),
                forms,
                any(isinstance(event.what, AppliedFunction) for event in trace.events),
                trace.draws,
                trace.compiled,
                frozenset(
                    first
                    for first, behind in trace.recomputed
                    if 0 < len(mine & {*range(first, behind)}) < behind - first
                ),
                num_stages > 1 and any(stage_of.get(position - 1, 0) < last for position in trace.selects),
                changes,
                varying,
                frozenset(trace.asked - varying),
                frozenset(range(start, stops)) - mine,
                imported,
                frozenset()
                if phase is None
                else frozenset(label for label in phase.kept if stage_of[trace.values[label].born] == stage),
                0 if phase is None else phase.begin,
                phase is not None,
                is_last,
                failure,
                trace.switches,
                trace.weights,
                without_gradients,
                before[stage],
                frozenset() if is_last else before[stage + 1],
                [value.content for value in trace.values],
            )
        )
    return programs


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
        len(growing(part.values[label].form.shape, whole.values[label].form.shape)) != 1
        and not counts_sequences(label, part.events[position : position + 1])
        for label in mine
    )


def counts_sequences(label: int, events: Iterable[Event]) -> bool:
    """Whether a value is the second of what `pack_padded_sequence` makes: for each step the sequences that have it."""
    packs = [event for event in events if getattr(event.what, "__name__", "") == "_pack_padded_sequence"]
    return any(isinstance(made := event.results[1], New) and made.label == label for event in packs)


def _made(event: Event) -> list[int]:
    return [leaf.label for leaf in event.results if isinstance(leaf, New)]
