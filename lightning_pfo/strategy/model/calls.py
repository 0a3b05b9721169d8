"""The order in which a step calls layers, which a partition divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.dividing.cutting import first_differentiated, undivided
from lightning_pfo.strategy.model.tracing.dividing.flow import Flow
from lightning_pfo.strategy.model.tracing.dividing.homes import followed_units
from lightning_pfo.strategy.model.tracing.dividing.phases import has_phases, phases_of
from lightning_pfo.strategy.model.tracing.events import Trace
from lightning_pfo.strategy.model.units import Unit, Units


@dataclass(frozen=True)
class LayerCalls:
    """The calls of layers in a step, in order; what else is called goes along with the layer before it.

    Attributes:
        layers: The layer of each call.
        others: Further units that each call takes along.
        undivided: Calls that are of one stage with the one before.
    """

    layers: tuple[Unit, ...]
    others: tuple[tuple[Unit, ...], ...]
    undivided: frozenset[int] = frozenset()

    @property
    def types(self) -> list[str]:
        """The class name of each."""
        return [type(unit.module).__name__ for unit in self.layers]

    @property
    def num_parameters(self) -> list[int]:
        """Number of parameters of each, with what it takes along."""
        return [
            sum(unit.num_parameters for unit in dict.fromkeys((layer, *others)))
            for layer, others in zip(self.layers, self.others, strict=True)
        ]


def layer_calls(units: Units, trace: Trace | None, *, once: bool = False) -> LayerCalls:
    """Find the order in which layers are called.

    Args:
        units: The units of the module.
        trace: A step that calls them; None: they are called in the order in which the module holds them.
        once: Whether of several calls of a layer the first one counts.
    """
    if trace is not None and trace.failure is None and has_phases(trace):
        return calls_by_need(trace)
    sequence: list[tuple[Unit, bool]] = []  # units, and whether the call of a layer begins with it
    if trace is None or not trace.marks:
        sequence = [(unit, unit.is_layer) for unit in units.all]
    else:
        begins = {position: unit for unit, position in trace.marks}
        for position, event in enumerate(trace.events):
            if position in begins:
                sequence.append((begins[position], True))
            sequence += [(unit, False) for unit in event.units if unit is not begins.get(position)]
        called = {unit for unit, _ in sequence}
        # nobody knows what follows where a trace ended early
        is_open = trace.failure is not None or once
        sequence += [(unit, unit.is_layer) for unit in units.all if is_open and unit not in called]
        if once:
            first = {unit: (unit, begins) for unit, begins in reversed(sequence)}
            sequence = [first[unit] for unit in dict.fromkeys(unit for unit, _ in sequence)]
    layers: list[Unit] = []
    others: list[list[Unit]] = [[]]
    for unit, begins_layer in sequence:
        if begins_layer:
            layers.append(unit)
            if len(layers) > 1:
                others.append([])
        else:
            others[-1].append(unit)
    return LayerCalls(
        tuple(layers),
        tuple(map(tuple, others[: len(layers)])),
        frozenset() if trace is None or trace.failure is not None or once else undivided(trace),
    )


def check_measurable(trace: Trace | None) -> None:
    """Check that layers of a step can be measured one after the other.

    Raises:
        ConfigurationError: If it optimizes several times.
    """
    if trace is not None and has_phases(trace):
        raise ConfigurationError(
            "partition='profile' measures the layers of a step with one backward, and this step has several, or calls "
            "layers after an optimizer's step. Use partition='parameters', or 'custom:...'."
        )


def calls_by_need(trace: Trace, order: Sequence[Unit] | None = None) -> LayerCalls:
    """The layers of a step, each once, where another needs it after those.

    So a step that calls layers several times, for each of two views, needs each on one stage. Layers whose weights
    follow those of others (a teacher's, moved by the step) are beside these, of one stage with them; so is what goes
    along with layers, such as an embedding.

    Args:
        trace: The step.
        order: The layers in the order of those that do not need each other; None: that of their first calls.
    """
    flow = Flow(trace)
    follows = followed_units(trace, flow)
    first_units, others = _beside(trace, follows)
    goes_with = {unit: layer for layer, units in others.items() for unit in units} | dict.fromkeys(first_units)
    sequence = {position: unit for unit, position in trace.marks}
    layer_of: list[Unit | None] = []
    layer: Unit | None = None
    for position, event in enumerate(trace.events):
        layer = sequence.get(position, layer)
        layer_of.append(goes_with.get(event.units[0], layer) if event.units else None)
    before: dict[Unit, set[Unit]] = {unit: set() for unit, _ in trace.marks}
    for phase in phases_of(trace, flow):
        reached: dict[int, set[Unit]] = {}
        for position in phase.computed:
            found = set[Unit]()
            for needed in flow.before[position]:
                found |= reached.get(needed, set())
            mine = layer_of[position]
            if mine is not None:
                before[mine] |= found - {mine}
                found.add(mine)
            reached[position] = found
    for each in trace.differentiations:
        within = {unit for unit in layer_of[first_differentiated(trace, each) : each.position] if unit is not None}
        for unit in within:
            before[unit] |= within - {unit}
    if order is not None:
        before = {unit: before[unit] for unit in order if unit in before}
    groups = _in_order_of_need(before, {unit: other for unit, other in follows.items() if {unit, other} <= {*before}})
    layers = [unit for group in groups for unit in group]
    starts = {group[0] for group in groups}
    return LayerCalls(
        tuple(layers),
        tuple((*(first_units if index == 0 else ()), *others.get(unit, ())) for index, unit in enumerate(layers)),
        frozenset(index for index, unit in enumerate(layers) if unit not in starts),
    )


def _beside(trace: Trace, follows: Mapping[Unit, Unit]) -> tuple[list[Unit], dict[Unit, list[Unit]]]:
    """Further units that go along with the first layer, and with each, as they are called, or as they follow others."""
    sequence = {position: unit for unit, position in trace.marks}
    layers = {unit for unit, _ in trace.marks}
    first_units: list[Unit] = []
    others: dict[Unit, list[Unit]] = {unit: [] for unit in layers}
    seen = set(layers)
    there = first_units
    for position, event in enumerate(trace.events):
        there = others[sequence[position]] if position in sequence else there
        there += [unit for unit in event.units if unit not in seen]
        seen.update(event.units)
    for unit, other in follows.items():
        lists = [first_units, *others.values()]
        its, its_other = (next((each for each in lists if one in each), others.get(one)) for one in (unit, other))
        is_apart = not any(f"{unit.name}.".startswith(f"{layer.name}.") for layer in layers)
        if is_apart and its is not None and its_other is not None and its is not its_other:
            its.remove(unit)
            its_other.append(unit)
    return first_units, others


def _in_order_of_need(before: dict[Unit, set[Unit]], follows: Mapping[Unit, Unit]) -> list[list[Unit]]:
    """Put units behind those that come before them; those that come before each other, or follow, are together."""
    reached = {unit: set(found) for unit, found in before.items()}
    changed = True
    while changed:
        changed = False
        for found in reached.values():
            more = found.union(*(reached[each] for each in found))
            changed = changed or len(more) > len(found)
            found |= more
    groups: list[list[Unit]] = []
    waiting = list(before)
    while waiting:
        ready = [each for each in waiting if all(each in reached[other] for other in reached[each] & {*waiting})]
        latest = groups[-1] if groups else []
        partners = {follows.get(each) for each in latest} | {each for each in follows if follows[each] in latest}
        following = [each for each in ready if each in partners]
        unit = (following or ready)[0]
        if not following:  # what follows it may need others before it can be there too
            its = [each for each in waiting if follows.get(each) is unit or follows.get(unit) is each]
            unit = next((each for each in ready if each is not unit and any(each in reached[f] for f in its)), unit)
        group = [each for each in waiting if each is unit or (each in reached[unit] and unit in reached[each])]
        if following:
            latest += group
        else:
            groups.append(group)
        waiting = [each for each in waiting if each not in group]
    return groups
