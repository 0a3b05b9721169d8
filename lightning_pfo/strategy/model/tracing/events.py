"""What is known of a step: the calls it makes, in order, and the values that flow between them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, base_of
from lightning_pfo.strategy.model.tracing.forms.left import Place
from lightning_pfo.strategy.model.tracing.functions import HOOKS
from lightning_pfo.strategy.model.tracing.tracked import Tracked
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_leaves

FOREVER = math.inf
_SINGLE = tree_flatten(0)[1]
"""What puts a single leaf together."""


@dataclass(frozen=True)
class New:
    """A result that is a value of its own.

    Attributes:
        label: Its number.
    """

    label: int


@dataclass(frozen=True)
class Adopted:
    """An ordinary tensor that an event changes in place, and that is followed from then on.

    Attributes:
        argument: Which of the leaves of the arguments.
        is_base: Whether it is what that is a view of.
        label: The number of the value.
    """

    argument: int
    is_base: bool
    label: int

    def of(self, leaves: list[Any]) -> Tensor:
        """The tensor among the leaves of the arguments of a call."""
        tensor: Tensor = leaves[self.argument]
        base = base_of(tensor) if self.is_base else None
        return tensor if base is None else base


@dataclass
class Value:
    """A tensor that flows between calls.

    Attributes:
        form: A tensor of its shape, dtype and device, without a value.
        born: The event that made it.
        last_use: The last event that takes it; `FOREVER` if it decides what runs, is logged or returned.
        memory: What memory it has, as a number; views have that of their base.
        changed_at: The last event that changed it in place.
        varies: Whether its shape depends on the values of other tensors, or may do so.
        gradient_from: The event that has written something with gradients into it, if it had none before; else -1.
        uses: The events that take it, in order.
        content: What it is told apart by from others, on all ranks alike; see `noticing.content`.
    """

    form: Tracked
    born: int
    last_use: float = -1
    memory: int = 0
    changed_at: int = -1
    varies: bool = False
    gradient_from: int = -1
    uses: list[float] = field(default_factory=list)
    content: int = 0

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.form.numel() * self.form.element_size()


NUMBERS = (bool, int, float)
"""Types of numbers that units may return beside tensors."""


@dataclass(frozen=True)
class Number:
    """A number that a unit returns, which may depend on values.

    Attributes:
        index: Which of the numbers of its event it is.
        value: What it is in the trace.
    """

    index: int
    value: Any


@dataclass(frozen=True)
class Passed:
    """A text that a unit returns as it was given.

    Attributes:
        argument: Its position among all leaves of the arguments.
    """

    argument: int


@dataclass
class Event:
    """A call of a unit, or of a function of torch with a tracked tensor.

    Attributes:
        what: The unit, or the function.
        results: The leaves of what it returns: `New`, `Same`, `Number`, `Passed`, or what it is.
        structure: What puts them together.
        adopted: Ordinary tensors that it changes in place.
        units: The units that run in it.
        held: Names of parameters and buffers that it is given, themselves or views of them; of units, beside their own.
        reads: Whether it turns values of tensors into Python's.
        line: The user's line, if it reads, or changes a value in place after the step has optimized.
        changes_state: Of units, whether they change buffers of their own.
        changes_weights: Of units, the names of those of their parameters that they change.
        rewrites: Of units, whether they change containers that they are given: what they return stands in `results`
            together with their arguments and named arguments as they are then.
        returns: Which of these they return, if they change and return one; else -1.
        saved_bytes: Of units, what autograd keeps for the backward.
        left: Of units, the attributes of their parts in which they leave tensors, which stand last in `results`.
        guessed_after: Of units, with what they fail in the trace, where what they return is guessed.
        detached: Of units, the labels of values that they take, and whose gradients do not depend on what they return.
        numbers: Of units, the value in which all numbers that they make are sent; None: they make none.
        of_metric: Whether a torchmetrics object calls it, which counts on the last stage.
        content: What it is told apart by from others, on all ranks alike; see `noticing.content`.
    """

    what: Any
    results: list[Any] = field(default_factory=list)
    structure: Any = None
    adopted: list[Adopted] = field(default_factory=list)
    units: list[Any] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    reads: bool = False
    line: str = ""
    changes_state: bool = False
    changes_weights: tuple[str, ...] = ()
    rewrites: bool = False
    returns: int = -1
    saved_bytes: int = 0
    left: tuple[Place, ...] = ()
    guessed_after: str = ""
    detached: frozenset[int] = frozenset()
    numbers: int | None = None
    of_metric: bool = False
    content: int = 0

    @property
    def made(self) -> list[int]:
        """The labels of the values that it makes, but of those that it adopts."""
        labels = [leaf.label for leaf in self.results if isinstance(leaf, New)]
        return labels if self.numbers is None else [*labels, self.numbers]

    @cached_property
    def only_label(self) -> int | None:
        """The label of what it returns, if that is one value of its own and all that comes of it; as mostly."""
        is_plain = not (self.adopted or self.reads or self.rewrites or self.what in HOOKS)
        only = self.results[0] if is_plain and self.structure == _SINGLE else None
        return only.label if isinstance(only, New) else None


@dataclass(frozen=True)
class Differentiation:
    """A call of `torch.autograd.grad`.

    Attributes:
        position: The event that it is.
        labels: The values that it differentiates by.
        first: The first event that takes another tensor that it differentiates by, or what comes of that; None: none.
        line: The user's line.
        module: The module whose own code it is, if it is that of a part of the user's.
    """

    position: int
    labels: tuple[int, ...]
    first: int | None
    line: str
    module: Any


@dataclass(frozen=True)
class Optimizing:
    """What a step does to optimize by itself.

    Attributes:
        position: The event that comes next.
        loss: The label of the loss that it differentiates, -1 of one that no stage computes; None: it does something
            with gradients or weights.
        changed: The parameters that it changes.
        names: Their names.
        line: The user's line.
    """

    position: int
    loss: int | None
    changed: frozenset[nn.Parameter]
    names: tuple[str, ...]
    line: str


@dataclass
class Trace:
    """What a step does.

    Attributes:
        events: Calls in order.
        values: What flows between them, by label.
        marks: When layers begin: the layer's unit and the event that comes next.
        of_layers: Names of the parameters of units, if any are used beside all events.
        everywhere: Names of parameters and buffers that are used beside all events, so on every stage.
        changed_everywhere: Those that are changed in place.
        at_end: Names of parameters and buffers that are logged or returned.
        changes: For the names of parameters and buffers that what a stage computes changes, in place or by assigning
            them anew: the events, and the user's lines.
        used_changed: For some of these names the units that have it, and are called after it was changed: the events.
        recomputed: Events of which activations are recomputed together, by `torch.utils.checkpoint`: first and behind
            the last.
        draws: Whether the step draws random numbers of its own after the first event.
        selects: How many events there were when a size came from the values of the batch, as by a mask that selects.
        has_sizes: Whether a size came from the values of stages.
        asked: Values whose size Python has been told.
        decided_after: How many events there were when Python first looked at numbers of stages, on which the size of
            anything may depend; None: it has not.
        decided_at: The user's line that did so first.
        deciding: Modules whose own code looks at values of tensors or differentiates, and None where it is in none.
        compiled: The user's line that a compiled function has between units, if one has any.
        skips: Whether the step has returned None before it called anything.
        failure: The error that ended it early, if one did: what comes after is not known.
        stale: Ordinary tensors that are used after a stage has changed their values through another view: the event
            that changes them, and the user's line.
        differentiations: Calls of `torch.autograd.grad`.
        listened: Units that are to be followed into: somebody hooks into a part, which does not see tracked tensors; or
            they log by themselves, or tell a metric of theirs something; or
            the step fails on zeros, and they prepare the batch alone.
        optimizing: What the step does to optimize by itself, in order.
        switches: Plain attributes of modules that the step itself sets and sets back.
        looks_again: Whether the step uses weights by themselves that it has changed.
        weights: Parameters that are followed, as attributes of modules: what takes one by itself is an event.
        caches: What units are given of a library's caches: the event, the unit and the cache.
        counted: Attributes of units in which they count something, by name.
        talking: Units that tell each other something beside tensors: the event and the unit.
        guessed_after: With what units fail whose results are guessed.
        loss: The label of the loss that it returns; None: it returns none that stages compute.
    """

    events: list[Event] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    marks: list[tuple[Any, int]] = field(default_factory=list)
    of_layers: list[str] = field(default_factory=list)
    everywhere: list[str] = field(default_factory=list)
    changed_everywhere: list[str] = field(default_factory=list)
    at_end: list[str] = field(default_factory=list)
    changes: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    used_changed: dict[str, list[int]] = field(default_factory=dict)
    recomputed: list[tuple[int, int]] = field(default_factory=list)
    draws: bool = False
    selects: list[int] = field(default_factory=list)
    has_sizes: bool = False
    asked: set[int] = field(default_factory=set)
    decided_after: int | None = None
    decided_at: str = ""
    deciding: list[Any] = field(default_factory=list)
    compiled: str = ""
    skips: bool = False
    failure: BaseException | None = None
    stale: list[tuple[int, str]] = field(default_factory=list)
    differentiations: list[Differentiation] = field(default_factory=list)
    listened: list[Any] = field(default_factory=list)
    optimizing: list[Optimizing] = field(default_factory=list)
    switches: list[tuple[nn.Module, str]] = field(default_factory=list)
    looks_again: bool = False
    weights: Sequence[tuple[nn.Module, str]] = ()
    caches: list[tuple[int, Any, Any]] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    talking: list[tuple[int, Any]] = field(default_factory=list)
    guessed_after: list[str] = field(default_factory=list)
    loss: int | None = None

    @property
    def decided_by_sizes(self) -> bool:
        """Whether Python has looked at numbers of stages."""
        return self.decided_after is not None

    def use(self, values: Any, when: float) -> None:
        """Note that an event takes tracked tensors."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tracked) and leaf.label >= 0:
                value = self.values[leaf.label]
                value.last_use = max(value.last_use, when)
                value.uses.append(when)

    def use_sizes(self, labels: Iterable[int], when: float) -> None:
        """Note that the sizes of values are needed."""
        for label in labels:
            self.values[label].last_use = max(self.values[label].last_use, when)
            self.values[label].uses.append(when)

    def need_as(self, whole: Trace) -> None:
        """Where the step fails at its end, let it need there what it needs on a whole batch, on which it does not."""
        if self.failure is None or whole.failure is not None or len(self.marks) < len(whole.marks):
            return
        for value, other in zip(self.values, whole.values, strict=False):
            value.last_use = other.last_use
            value.uses = [use for use in other.uses if use == FOREVER or use < len(self.events)]

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter], names: Iterable[str], line: str) -> None:
        """Note what the step does to optimize by itself; see `Optimizing`."""
        self.use(loss, FOREVER)
        label = None if loss is None else loss.label if isinstance(loss, Tracked) else -1
        self.optimizing.append(Optimizing(len(self.events), label, frozenset(changed), tuple(names), line))

    def taken(self) -> list[list[int]]:
        """The labels of the values that each event takes."""
        found: list[list[int]] = [[] for _ in self.events]
        for label, value in enumerate(self.values):
            for use in {int(use) for use in value.uses if use != FOREVER}:
                found[use].append(label)
        return found

    def need_gradients(self, label: int, position: int) -> None:
        """Note that an event writes something with gradients into a value, and so into all that share its memory."""
        memory = self.values[label].memory
        with DisableTorchFunctionSubclass():
            for value in self.values:
                can_have = value.form.dtype.is_floating_point or value.form.dtype.is_complex
                if value.memory == memory and can_have and not value.form.requires_grad:
                    value.form.requires_grad_()
                    value.gradient_from = position

    def switch_on(self, label: int, position: int) -> None:
        """Note that an event lets a value have gradients, `requires_grad_()`, and no other that shares its memory."""
        value = self.values[label]
        with DisableTorchFunctionSubclass():
            if not value.form.requires_grad:
                value.form.requires_grad_()
                value.gradient_from = position

    def last_changes(self) -> dict[int, int]:
        """When memory is changed in place for the last time: a change through one view changes all."""
        found: dict[int, int] = {}
        for value in self.values:
            found[value.memory] = max(found.get(value.memory, -1), value.changed_at)
        return found

    def units_of_the_batch(self) -> list[Any]:
        """Units without tensors that take nothing of a stage, so that all ranks may compute what they return."""
        taking = {use for value in self.values for use in value.uses}
        return [
            event.what
            for position, event in enumerate(self.events)
            if event.units == [event.what]
            and position not in taking
            and not event.what.is_layer
            and not any(True for named in (event.what.module.parameters(), event.what.module.buffers()) for _ in named)
        ]

    def live(self, position: int) -> list[int]:
        """The values that are there before an event, and needed by it or later."""
        return [label for label, value in enumerate(self.values) if value.born < position <= value.last_use]
