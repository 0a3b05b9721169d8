"""The phases of a step that optimizes by itself several times, as GANs do.

A phase ends where the step does something with gradients or weights and then computes more. Each phase is run by the
pipeline on its own, with the weights that the one before has left. Of what earlier phases have computed it gets values;
where it differentiates by more of them, what made them is computed again, with the same random numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.dividing.flow import Flow
from lightning_pfo.strategy.model.tracing.events import FOREVER, Optimizing, Trace


@dataclass(frozen=True)
class Phase:
    """What a phase computes.

    Attributes:
        computed: Its events, rising.
        begin: The first event that is its own; those before are computed again.
        stop: The event before which it ends; None: it runs to the end of the step.
        imported: Labels of the values that earlier phases have computed.
        kept: Labels of those that it computes for later ones.
    """

    computed: tuple[int, ...]
    begin: int = 0
    stop: int | None = None
    imported: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


@dataclass
class _Extent:
    """The events of a phase, the losses that it differentiates, and what the step has done to optimize before it."""

    begin: int
    stop: int
    past: Sequence[Optimizing] = ()
    losses: list[Optimizing] = field(default_factory=list)


def phases_of(trace: Trace, flow: Flow) -> list[Phase]:
    """The phases of a step.

    Args:
        trace: The step.
        flow: What its events need.

    Raises:
        ConfigurationError: If it does what cannot be done in phases.
    """
    extents = _extents(trace)
    if len(extents) == 1:
        return [Phase(tuple(range(len(trace.events))))]
    _check(trace)
    begins = [extent.begin for extent in extents]
    needs = [_Needs(trace, flow, extent, begins) for extent in extents]
    phases = []
    for index, (extent, needed) in enumerate(zip(extents, needs, strict=True)):
        later = frozenset[int]().union(*(other.imported for other in needs[index + 1 :]))
        phases.append(
            Phase(
                (*sorted(needed.again), *range(extent.begin, extent.stop)),
                extent.begin,
                extent.stop if index + 1 < len(extents) else None,
                frozenset(needed.imported),
                frozenset(label for label in later if extent.begin <= trace.values[label].born < extent.stop),
            )
        )
    return phases


def has_phases(trace: Trace) -> bool:
    """Whether a step has several phases."""
    return len(_extents(trace)) > 1


def to_be_followed(trace: Trace, *, of_layers: bool) -> list[str]:
    """The weights and buffers that a step uses beside all events, and that had better be followed.

    Those of layers, which else all stages hold. And if the step has phases, those that it changes: each phase uses them
    with other values, and a gradient of theirs belongs to one phase.

    Args:
        trace: The step.
        of_layers: Whether those of layers count.
    """
    wanted = {*trace.of_layers} if of_layers else set()
    if trace.looks_again or has_phases(trace):
        wanted |= {*_stepped(trace), *trace.changed_everywhere}
    return sorted(wanted.intersection(trace.everywhere))


def _stepped(trace: Trace) -> set[str]:
    return {name for each in trace.optimizing for name in each.names}


def _extents(trace: Trace) -> list[_Extent]:
    found = [_Extent(0, len(trace.events))]
    end: int | None = None  # of the present phase, if it has one
    last = Optimizing(len(trace.events), None, frozenset(), (), "")
    for index, each in enumerate((*trace.optimizing, last)):
        if end is not None and (each.loss is not None or _uses_weights(trace, end, each.position)):
            found[-1].stop = end
            found.append(_Extent(end, len(trace.events), trace.optimizing[:index]))
            end = None
        if each.loss is not None:
            found[-1].losses.append(each)
        elif found[-1].losses or each.changed:
            end = each.position  # what was computed since the first of these has no weights
    return found


def _uses_weights(trace: Trace, start: int, stop: int) -> bool:
    events = trace.events[start:stop]
    return any(event.held or any(unit.num_parameters for unit in event.units) for event in events)


class _Needs:
    """What a phase needs of earlier ones.

    Attributes:
        imported: Labels of values.
        again: Events that are computed again.
    """

    def __init__(self, trace: Trace, flow: Flow, extent: _Extent, begins: Sequence[int]) -> None:
        self._trace, self._flow, self._begin, self._begins = trace, flow, extent.begin, begins
        self._past = extent.past
        self.imported: set[int] = set()
        self.again: set[int] = set()
        self._line = extent.losses[-1].line if extent.losses else ""
        if not self._begin:
            return
        losses = [each.loss for each in extent.losses if each.loss is not None and each.loss >= 0]
        differentiated = flow.closure({trace.values[loss].born for loss in losses})
        for position in range(extent.begin, extent.stop):
            made = trace.events[position].made
            differentiable = position in differentiated and any(trace.values[n].form.requires_grad for n in made)
            for label in flow.inputs[position]:
                self._take(label, differentiable=differentiable)
        for loss in losses:
            self._take(loss, differentiable=True)
        for label, value in enumerate(trace.values):
            if value.last_use == FOREVER:
                self._take(label, differentiable=False)
        self.imported = {label for label in self.imported if trace.values[label].born not in self.again}
        self._check_unchanged()

    def _take(self, label: int, *, differentiable: bool) -> None:
        value = self._trace.values[label]
        if value.born >= self._begin:
            return
        if differentiable and value.form.requires_grad:
            self._repeat(value.born)
        else:
            self.imported.add(label)

    def _repeat(self, position: int) -> None:
        if position in self.again:
            return
        event = self._trace.events[position]
        self.again.add(position)
        names, parameters = set(event.held), {p for unit in event.units for p in unit.module.parameters()}
        for each in self._past:
            if position < each.position and (parameters & each.changed or names & set(each.names)):
                raise ConfigurationError(
                    f"A step differentiates by what it has computed before it changed the weights of that: "
                    f"{self._line} is given what depends on these, which changed at {each.line} (On one device PyTorch "
                    f"says that they are 'modified by an inplace operation'.) Give x.detach() to what comes after "
                    f"optimizer.step(), or compute x again."
                )
        inputs = self._flow.inputs[position]
        for label in inputs:
            self._take(label, differentiable=True)
        for before in self._flow.before[position] - {self._trace.values[label].born for label in inputs}:
            self._repeat(before)  # it changes in place what this one takes

    def _check_unchanged(self) -> None:
        values = self._trace.values
        born = {values[label].memory: bisect_right(self._begins, values[label].born) for label in self.imported}
        for value in values:
            if value.memory in born and bisect_right(self._begins, value.changed_at) > born[value.memory]:
                raise ConfigurationError(
                    f"A step that optimizes several times on a pipeline runs again for each time, and finds there what "
                    f"it computed before as it was then; here it changes such a tensor in place, at "
                    f"{self._trace.events[value.changed_at].line} Let it make another one: total = total + x for "
                    f"total += x, and x = x.clone() before something is written into x; or keep what is only logged "
                    f"in a list (losses.append(loss.detach()))."
                )


def _check(trace: Trace) -> None:
    changes = sorted(trace.changed_everywhere)
    if changes:
        raise ConfigurationError(
            f"A step that optimizes several times on a pipeline runs again for each time, so it changes no buffers "
            f"by itself; here it changes {', '.join(map(repr, changes))}. Do so in a layer, or in on_train_batch_end."
        )
    used = sorted(_stepped(trace) & {*trace.everywhere, *trace.at_end})
    if used:
        raise ConfigurationError(
            f"A step that optimizes several times on a pipeline runs again for each time, with other weights, so it "
            f"uses weights in calls of layers, or together with what layers have computed; here it uses by themselves "
            f"{_some(used)}. Use a weight together with what a layer has computed (with x of a layer and weight w, "
            f"(w + 0 * x).exp() for w.exp()), or in a module of its own that is called with x; what is no part of a "
            f"loss belongs in a hook such as on_train_batch_end."
        )
    if trace.decided_by_sizes:
        raise ConfigurationError(
            f"A step that optimizes several times on a pipeline decides nothing by what layers compute, of which each "
            f"microbatch has its own; here it does so at {trace.decided_at} Decide by batch_idx, or by what "
            f"on_train_batch_end has kept of the batch before (self.trainer.callback_metrics)."
        )
    if trace.has_sizes:
        raise ConfigurationError(
            "A step that optimizes several times on a pipeline has no tensors whose sizes depend on values (x[mask], "
            "nonzero, unique of what layers compute). Select in the forward of a layer, or do one backward in each "
            "batch (if batch_idx % 2 == 0: ...)."
        )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} others"
