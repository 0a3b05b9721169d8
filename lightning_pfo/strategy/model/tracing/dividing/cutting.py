"""Where a traced step can be cut, and where it is: what must stay on one stage, and where the least has to be sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.model.tracing.events import Differentiation, Trace

_MOVE = "move the boundary with partition='custom:...', or use fewer stages"

SHARES_MEMORY = (
    f"Two tensors that share memory cross the boundary between two stages, and one of them is changed in place "
    f"afterwards; the other would not change with it. Change a copy (x = x.clone()), or {_MOVE}."
)


class LeadsBackError(ConfigurationError):
    """What a step needs leads back to an earlier stage."""


def leads_back(name: str, stage: int, previous: str, after: int) -> str:
    """What is said where a stage is needed after a later one.

    Args:
        name: What is needed.
        stage: The stage that has it.
        previous: What has been used before.
        after: The stage that has that.
    """
    return (
        f"Stages run one after the other, but {name!r}, which stage {stage} has, is used after {previous!r}, which "
        f"stage {after} has. Call the model's parts in one order, or move the boundaries with "
        f"partition='custom:...' so that one stage has both."
    )


class Obstacles:
    """What stands against cutting a step before an event.

    Args:
        trace: The step.
        finds_home: Whether what the step does with weights is computed where their layers are, and not in the order of
            calls.

    Attributes:
        undivided: What must not be cut: the first cut, the one behind the last, and why.
        together: Events that are of one stage, and why.
    """

    def __init__(self, trace: Trace, *, finds_home: bool = False) -> None:
        self._trace = trace
        self._changed_at = trace.last_changes()
        self.undivided: list[tuple[int, float, str]] = [
            *_of_stale(trace),
            *_of_statistics(trace),
            *_of_weights(trace),
            *_of_caches(trace),
            *_of_talking(trace),
        ]
        self.together: list[tuple[frozenset[int], str]] = [
            *_of_buffers(trace),
            *(() if finds_home else _of_changed(trace)),
        ]

    def refusal(self, cut: int) -> str:
        """Why a step cannot be cut before an event; empty: it can."""
        for start, stop, why in self.undivided:
            if start <= cut < stop:
                return why
        for events, why in self.together:
            if min(events) < cut <= max(events):
                return why
        if any(_parts(self._trace, each, cut) for each in self._trace.differentiations):
            one = next(each for each in self._trace.differentiations if _parts(self._trace, each, cut))
            return differentiates(one.line, module=one.module)
        return self._shares(cut)

    def _shares(self, cut: int) -> str:
        by_memory: dict[int, int] = {}
        for label in self._trace.live(cut):
            memory = self._trace.values[label].memory
            other = by_memory.setdefault(memory, label)
            if other != label and self._changed_at[memory] >= cut:
                return SHARES_MEMORY
        return ""


def _of_stale(trace: Trace) -> Iterator[tuple[int, float, str]]:
    for event, line in trace.stale:
        yield (
            event + 1,
            float("inf"),
            f"A tensor that the step has made itself is changed in place by what one stage computes, and used "
            f"through another view of it afterwards, which other stages do not see changed: {line} Change a tensor "
            f"made of stages' values instead (x = x.clone()), or use what was changed itself.",
        )


def _of_buffers(trace: Trace) -> Iterator[tuple[frozenset[int], str]]:
    """Others than the stage that changes a buffer last get its value after the iteration."""
    for name, changes in trace.changes.items():
        last, line = max(changes)
        uses = [event for event, _ in changes]
        uses += [position for position, event in enumerate(trace.events[:last]) if name in event.held]
        yield (
            frozenset(uses),
            f"{name!r} is changed by what one stage computes, but used on an earlier one as well, which runs the "
            f"next microbatch before it knows of the change. {line} Use a copy that changes after the batch "
            f"(on_train_batch_end); or {_MOVE}, so that one stage does both.",
        )


def _of_changed(trace: Trace) -> Iterator[tuple[frozenset[int], str]]:
    """A layer uses its own weights and buffers, which are not sent."""
    for name, uses in trace.used_changed.items():
        first, line = min(trace.changes[name])
        layers = dict.fromkeys(unit.name for position in uses for unit in trace.events[position].units)
        yield (
            frozenset([first, *uses]),
            f"{name!r} is changed by what one stage computes, and then used by {', '.join(map(repr, layers))}, not on "
            f"that stage alone; others do not know of the change within the batch. {line} Change it before the step "
            f"(on_train_batch_start); or {_MOVE}, so that one stage has all of it.",
        )


def _of_statistics(trace: Trace) -> Iterator[tuple[int, float, str]]:
    """Each rank has the running statistics of its own calls."""
    calls: dict[nn.Module, list[tuple[int, bool, str]]] = {}
    for position, event in enumerate(trace.events):
        for unit in event.units:
            parts = [part for part in unit.module.modules() if "running_mean" in tensors_of(part).buffers]
            for module in {unit.module, *parts}:
                calls.setdefault(module, []).append((position, event.changes_state, unit.name))
    for of_module in calls.values():
        if len({changes for _, changes, _ in of_module}) > 1:
            first, *_, last = sorted(position for position, _, _ in of_module)
            yield (
                first + 1,
                last + 1,
                f"{of_module[0][2]!r} changes its buffers, such as running statistics, in one call, and uses them "
                f"without a change in another, as in eval(), and a boundary lies between its calls: each rank has "
                f"those of its own calls, so these would be others than on one device. Give each call a module of its "
                f"own; or {_MOVE}, so that one stage has all calls.",
            )


def _of_weights(trace: Trace) -> Iterator[tuple[int, float, str]]:
    """Who uses a weight on one rank knows nothing of what a layer writes into it on another."""
    writing = {(unit, name): None for event in trace.events for unit in event.units for name in event.changes_weights}
    units = {unit: None for event in trace.events for unit in event.units} if writing else {}
    holders: dict[int, list[tuple[Any, str]]] = {}
    for unit in units:
        for name, parameter in unit.module.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), []).append((unit, name))
    of_names = {(unit, name): of_one for of_one in holders.values() for unit, name in of_one}
    for unit, written in writing:
        having = of_names.get((unit, written), [(unit, written)])  # not of one that it is given
        using, names = {each for each, _ in having}, {f"{each.name}.{name}" for each, name in having}
        users = ", ".join(repr(each.name) for each in units if each in using)
        yield from _of_one_stage(
            [
                position
                for position, event in enumerate(trace.events)
                if not (using.isdisjoint(event.units) and names.isdisjoint(event.held))
            ],
            f"{unit.name!r} writes into its weights when it is called, as an embedding with max_norm does, and a "
            f"boundary lies between two calls that use them (of {users}): each rank would change other rows. Normalise "
            f"the weights before the step (in on_train_batch_start), or what is looked up; or {_MOVE}, so that one "
            f"stage has all calls.",
        )


def _of_caches(trace: Trace) -> Iterator[tuple[int, float, str]]:
    """In a cache of keys and values each layer finds what it has put there itself; nothing of that is sent."""
    calls: dict[tuple[int, Any], list[int]] = {}
    for position, unit, cache in trace.caches:
        calls.setdefault((id(cache), unit), []).append(position)
    for (_, unit), positions in calls.items():
        yield from _of_one_stage(
            positions,
            f"{unit.name!r} is called several times with one cache of keys and values, and a boundary lies between "
            f"these calls: the later stage would not find what an earlier one has put there. Leave the cache out "
            f"(use_cache=False), as training does not need it; or call it once; or {_MOVE}, so that one stage has all "
            f"calls.",
        )


def _of_one_stage(positions: Sequence[int], why: str) -> Iterator[tuple[int, float, str]]:
    """No cut between the first and the last of some events, in order."""
    if len(positions) > 1:
        yield positions[0] + 1, positions[-1] + 1, why


def _of_talking(trace: Trace) -> Iterator[tuple[int, float, str]]:
    """What units tell each other through Python's variables they find there only if all have run."""
    if len(trace.talking) > 1:
        (first, one), *_, (last, other) = trace.talking
        yield (
            first + 1,
            last + 1,
            f"Units from {one.name!r} to {other.name!r} tell each other something beside tensors, as by a number that "
            f"each counts up, or a list or an iterator from which each takes an item: called again with the same, they "
            f"do something else. A boundary lies between them, and the later stage, where the earlier ones do not "
            f"run, would do other things than one device. Give each unit what it needs as an argument of its call, or "
            f"as an attribute when it is made (self.depth = depth); or {_MOVE}.",
        )


def _parts(trace: Trace, differentiation: Differentiation, cut: int) -> bool:
    """Whether a cut parts a call of `torch.autograd.grad` from a way to what it differentiates by."""
    if cut > differentiation.position:
        return False
    if differentiation.first is not None and differentiation.first < cut:
        return True
    for label in differentiation.labels:
        by = trace.values[label]
        if by.born < cut:
            others = (trace.values[other] for other in trace.live(cut) if other != label)
            if not by.form.requires_grad or any(
                other.form.requires_grad and max(other.born, other.changed_at) > by.born for other in others
            ):
                return True
    return False


def first_differentiated(trace: Trace, differentiation: Differentiation) -> int:
    """The first event of those that are of one stage with a call of `torch.autograd.grad`."""
    born = [trace.values[label].born for label in differentiation.labels]
    return min([*born, *([] if differentiation.first is None else [differentiation.first])])


def differentiates(line: str, error: object = "a boundary lies between them", module: Any = None) -> str:
    """What is said where a step differentiates by itself, over a stage boundary; maybe in a module's own code."""
    out = (
        "Put all that is differentiated into one module, and call torch.autograd.grad in its forward, so that one "
        "stage has both"
        if module is None
        else f"{type(module).__name__} does so in its own forward, which one stage has to compute: the others need "
        f"layers outside of it, such as those that make what it takes"
    )
    return (
        f"torch.autograd.grad in a step can only differentiate what the same stage has computed, and here it asks for "
        f"the gradient by a tensor from before it ({error}): {line} {out}; or {_MOVE}."
    )


def undivided(trace: Trace) -> frozenset[int]:
    """Of the layers that a step calls, those before which it cannot be cut: they stay with the one before."""
    obstacles = Obstacles(trace, finds_home=bool(trace.weights))
    return frozenset(
        number
        for number, (_, position) in enumerate(trace.marks)
        if number and all(map(obstacles.refusal, _between_units(trace, position)))
    )


Bound = list[tuple[str, frozenset[int]]]
"""What an event needs of what only some stages have: names of units, parameters and buffers, and these stages."""


def cuts_before(trace: Trace, positions: Sequence[int], bound: Sequence[Bound]) -> list[int]:
    """Where to cut so that the event at each position begins a stage: where the least has to be sent.

    Where nothing stands against it, and rather where no size depends on values: it would have to be told. Between the
    last unit with parameters before the position and the position itself.

    Args:
        trace: The step.
        positions: The first event of each stage but the first.
        bound: For each event what it needs.
    """
    cuts = []
    obstacles = Obstacles(trace)
    for stage, position in enumerate(positions, start=1):
        every = _between_units(trace, position)
        allowed = [
            cut
            for cut in every
            if _all_have(bound[every[0] : cut], stage - 1) and _all_have(bound[cut:position], stage)
        ]
        possible = [cut for cut in allowed or every if not obstacles.refusal(cut)]
        cuts.append(
            min(
                possible or allowed or every,
                key=lambda cut: (_num_varying(trace, cut), _bytes(trace, cut), -cut),
            )
        )
    return cuts


def _all_have(bound: Sequence[Bound], stage: int) -> bool:
    return all(stage in stages for of_event in bound for _, stages in of_event)


def _between_units(trace: Trace, position: int) -> range:
    first = position
    while first > 0 and not any(unit.num_parameters for unit in trace.events[first - 1].units):
        first -= 1
    return range(max(first, 1), position + 1)


def _num_varying(trace: Trace, cut: int) -> int:
    return sum(trace.values[label].varies for label in trace.live(cut))


def _bytes(trace: Trace, cut: int) -> int:
    return sum(trace.values[label].num_bytes for label in trace.live(cut))


def cuts_by_owner(bound: Sequence[Bound], num_stages: int) -> list[int]:
    """Where to cut so that each stage has what it needs.

    Args:
        bound: For each event of a step, which may differ from that which the partition was made for, what it needs.
        num_stages: Number of stages.

    Raises:
        LeadsBackError: If what is needed leads back to an earlier stage.
    """
    cuts: list[int] = []
    previous = ""
    for position, of_event in enumerate(bound):
        for name, stages in of_event:
            if len(cuts) not in stages:
                later = [stage for stage in stages if stage > len(cuts)]
                if not later:
                    raise LeadsBackError(leads_back(name, max(stages), previous, len(cuts)))
                cuts += [position] * (min(later) - len(cuts))
            previous = name
    return cuts + [len(bound)] * (num_stages - 1 - len(cuts))
