"""Where what a step does with weights of layers by themselves is computed: where the layers are, if it can be.

A penalty (`sum(p.norm() for p in self.parameters())`) needs a number of each weight, and a number is sent. What stays
as large as the weights themselves is computed where it is needed, whose stage holds the weights as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.model.tracing.dividing.flow import Flow
from lightning_pfo.strategy.model.tracing.events import Event, Trace
from lightning_pfo.strategy.model.units import Unit

_SMALLER = 16
"""What is so much smaller than the weights that it was made from is sent."""


@dataclass(frozen=True)
class OfLayer:
    """A parameter or buffer of a layer.

    Attributes:
        stage: The first stage that has the layer.
        num_bytes: Its size.
    """

    stage: int
    num_bytes: int


def homes_of(trace: Trace, flow: Flow, layers: Mapping[str, OfLayer]) -> dict[int, int]:
    """The stages of events that need weights of one stage only.

    Those that make something small, or what no event takes, or that need weights which the step changes.

    Args:
        trace: The step.
        flow: What its events need.
        layers: The parameters and buffers of layers, by name.
    """
    stages: dict[int, int] = {}
    num_bytes: dict[int, int] = {}
    homes: dict[int, int] = {}
    for position, event in enumerate(trace.events):
        before = flow.before[position]
        if event.units or event.reads or not (before.issubset(stages) and layers.keys() >= set(event.held)):
            continue
        needed = {stages[each] for each in before} | {layers[name].stage for name in event.held}
        if len(needed) != 1:
            continue
        (stages[position],) = needed
        num_bytes[position] = sum(num_bytes[each] for each in before) + sum(layers[n].num_bytes for n in event.held)
        is_changed = not trace.changes.keys().isdisjoint(event.held)  # others hear of it after the batch
        if _SMALLER * _made_bytes(trace, event) <= num_bytes[position] or is_changed or not flow.takers[position]:
            homes[position] = stages[position]
    changes = {event: layers[name].stage for name, of in trace.changes.items() if name in layers for event, _ in of}
    return homes | changes


def _made_bytes(trace: Trace, event: Event) -> int:
    return sum(trace.values[label].num_bytes for label in event.made)


def followed_units(trace: Trace, flow: Flow) -> dict[Unit, Unit]:
    """The units whose weights the step makes of those of one other unit, and that one.

    Args:
        trace: The step, with weights followed.
        flow: What its events need.
    """
    layers = dict.fromkeys(unit for unit, _ in trace.marks)
    called = dict.fromkeys(unit for event in trace.events for unit in event.units if unit not in layers)
    # of what lies in a layer, the layer
    units = [*called, *layers] if trace.changes else []
    of_name = {f"{unit.name}.{name}": unit for unit in units for name in named_tensors(unit.module)}
    found: dict[Unit, set[Unit]] = {}
    for name, changes in trace.changes.items():
        if name in of_name:
            needed = flow.closure({event for event, _ in changes})
            used = {of_name[each] for event in needed for each in trace.events[event].held if each in of_name}
            found.setdefault(of_name[name], set()).update(used - {of_name[name]})
    return {unit: next(iter(others)) for unit, others in found.items() if len(others) == 1}
