"""Which events of a step need which others, and stages for them where calls do not follow the order of the stages.

A stage may compute an event that the step calls before others of earlier stages, if it needs nothing of these: what a
discriminator says of real samples, say, before a generator has made others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.dividing.cutting import (
    SHARES_MEMORY,
    Bound,
    LeadsBackError,
    Obstacles,
    differentiates,
    first_differentiated,
    leads_back,
)
from lightning_pfo.strategy.model.tracing.events import FOREVER, Trace, Value

StageOf = Mapping[int, int]
"""The stages of events."""
NO_HOMES: Mapping[int, int] = MappingProxyType({})


class Flow:
    """What events need.

    Args:
        trace: The step.

    Attributes:
        inputs: Labels of the values that each event takes.
        before: The events that come before each, as it needs what they make or change.
    """

    def __init__(self, trace: Trace) -> None:
        self.inputs = trace.taken()
        self.before = [{trace.values[label].born for label in labels} for labels in self.inputs]
        changed = {value.memory for value in trace.values if value.changed_at >= 0}
        touching: dict[int, set[int]] = {}
        for value in trace.values:
            if value.memory in changed:
                uses = {int(use) for use in value.uses if use != FOREVER}
                touching.setdefault(value.memory, set()).update(uses, (value.born,))
        for positions in touching.values():  # what is changed in place is touched in order
            ordered = sorted(positions)
            for index, position in enumerate(ordered):
                self.before[position].update(ordered[:index])
        for position, before in enumerate(self.before):
            before.discard(position)

    @cached_property
    def takers(self) -> list[list[int]]:
        """The events that need each."""
        found: list[list[int]] = [[] for _ in self.before]
        for position, before in enumerate(self.before):
            for each in before:
                found[each].append(position)
        return found

    def closure(self, events: set[int]) -> set[int]:
        """Events with all that they need, and what that needs."""
        found: set[int] = set()
        waiting = list(events)
        while waiting:
            position = waiting.pop()
            if position not in found:
                found.add(position)
                waiting += self.before[position]
        return found


def stages_by_owner(
    trace: Trace,
    flow: Flow,
    computed: Sequence[int],
    bound: Sequence[Bound],
    num_stages: int,
    homes: Mapping[int, int] = NO_HOMES,
) -> dict[int, int]:
    """Give each event to a stage that has what it needs, and no earlier one than those of the events before it.

    Args:
        trace: The step.
        flow: What its events need.
        computed: The events that are computed, rising; others have been computed before.
        bound: For each event of the step what it needs of what only some stages have.
        num_stages: Number of stages.
        homes: Where events that need nothing of stages are computed rather than elsewhere.

    Raises:
        LeadsBackError: If what is needed leads back to an earlier stage.
        ConfigurationError: If it cannot be divided so.
    """
    stage_of: dict[int, int] = {}
    floor = 0
    for position in computed:
        needed = [before for before in flow.before[position] if before in stage_of]
        lowest = max([floor, *(stage_of[before] for before in needed)])
        for name, stages in bound[position]:
            if max(stages) < lowest:
                raise LeadsBackError(leads_back(name, max(stages), _previous(bound, stage_of, lowest), lowest))
        have = [stage for stage in range(lowest, num_stages) if all(stage in stages for _, stages in bound[position])]
        if not have:
            raise LeadsBackError(_apart(bound[position]))
        stage_of[position] = have[0]
        if trace.events[position].reads and not trace.events[position].of_metric:  # Python goes on by it
            floor = have[0]
    _rather_later(trace, flow, computed, bound, stage_of, homes)
    _with_differentiation(trace, flow, bound, stage_of)
    _check(trace, stage_of)
    return stage_of


def _rather_later(
    trace: Trace,
    flow: Flow,
    computed: Sequence[int],
    bound: Sequence[Bound],
    stage_of: dict[int, int],
    homes: Mapping[int, int],
) -> None:
    """What needs nothing of stages is computed at home, or where it is needed, so that nothing is sent."""
    free: set[int] = set()
    for position in computed:
        is_bound = bool(trace.events[position].units) and bool(bound[position])
        if not is_bound and all(each in free or each not in stage_of for each in flow.before[position]):
            free.add(position)
    for position in reversed(computed):  # those that take what it makes come after it
        limits = [stage_of[other] for other in flow.takers[position] if other in stage_of]
        limits += [homes[position]] if position in homes else []
        if position in free and limits:
            own = range(stage_of[position], min(limits) + 1)
            allowed = [stage for stage in own if all(stage in stages for _, stages in bound[position])]
            stage_of[position] = max(allowed, default=stage_of[position])


def _with_differentiation(trace: Trace, flow: Flow, bound: Sequence[Bound], stage_of: dict[int, int]) -> None:
    """What makes the tensors by which `torch.autograd.grad` differentiates is computed on its stage, if it can be."""
    for each in trace.differentiations:
        stage = stage_of.get(each.position, -1)
        for position in range(each.position - 1, first_differentiated(trace, each) - 1, -1):
            takers = [stage_of[other] for other in flow.takers[position] if other in stage_of]
            is_free = not bound[position] and not trace.events[position].reads
            if stage_of.get(position, stage) < stage and is_free and all(taker >= stage for taker in takers):
                stage_of[position] = stage


def _previous(bound: Sequence[Bound], stage_of: StageOf, stage: int) -> str:
    """What was used on a stage last; events are on later ones than the first for the sake of such things only."""
    return bound[max(before for before, of in stage_of.items() if of == stage and bound[before])][-1][0]


def _apart(bound: Bound) -> str:
    """What is said where one event needs what no stage has together."""
    (name, stages), *others = sorted(bound, key=lambda each: max(each[1]))
    other, elsewhere = others[-1]
    return (
        f"One stage computes each operation, but {name!r}, which stage {max(stages)} has, is used together with "
        f"{other!r}, which stage {min(elsewhere)} has. Move the boundaries with partition='custom:...' so that one "
        f"stage has both."
    )


def _check(trace: Trace, stage_of: StageOf) -> None:
    """Check that nothing stands against dividing a step so.

    Raises:
        ConfigurationError: If something does.
    """
    ordered = [stage_of[position] for position in sorted(stage_of)]
    is_ordered = ordered == sorted(ordered)
    obstacles = Obstacles(trace)
    for start, stop, why in obstacles.undivided:
        within = {stage for position, stage in stage_of.items() if start - 1 <= position < stop}
        if len(within) > 1:
            raise ConfigurationError(why)
    for events, why in obstacles.together:
        if len({stage_of[position] for position in events if position in stage_of}) > 1:
            raise ConfigurationError(why)
    for each in trace.differentiations:
        first = first_differentiated(trace, each)
        within = {stage for position, stage in stage_of.items() if first <= position <= each.position}
        if len(within) > 1:
            raise ConfigurationError(differentiates(each.line, module=each.module))
    last = max(stage_of.values(), default=0)
    end_of_others = max((position for position, stage in stage_of.items() if stage < last), default=-1)
    depends = [value.born for value in trace.values if value.varies]
    if trace.decided_after is not None:
        depends.append(trace.decided_after)
    if not is_ordered and min(depends, default=math.inf) <= end_of_others:  # else the last stage alone sees it
        raise ConfigurationError(
            "A step in which sizes depend on the values of tensors calls the model's parts in the order of the stages; "
            "here it calls one of a later stage first. Call them in one order, or move the boundaries with "
            "partition='custom:...' so that one stage has both."
        )
    changed: dict[int, int] = {}  # the last stage that changes some memory
    for value in trace.values:
        changed[value.memory] = max(changed.get(value.memory, -1), stage_of.get(value.changed_at, -1))
    for stage in set(stage_of.values()) - {0}:
        crossing: set[int] = set()
        for value in trace.values:
            if stage_of.get(value.born, stage) < stage <= last_stage(value, stage_of, stage):
                if value.memory in crossing and changed[value.memory] >= stage:
                    raise ConfigurationError(SHARES_MEMORY)
                crossing.add(value.memory)


def last_stage(value: Value, stage_of: StageOf, last: int) -> int:
    """The last stage that needs a value; -1: none.

    Args:
        value: The value.
        stage_of: The stages of events.
        last: Where the step ends, which needs what is needed for ever.
    """
    return max((last if use == FOREVER else stage_of.get(int(use), -1) for use in value.uses), default=-1)
