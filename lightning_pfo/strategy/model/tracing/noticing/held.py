"""The parameters and buffers of a module in a trace of its step: which are used, changed, or followed as values are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.compat.tensors import change_mark, has_memory, memory_of, reserved_memory
from lightning_pfo.strategy.model.tracing.events import Event, Trace
from lightning_pfo.strategy.model.tracing.forms.selecting import selects
from lightning_pfo.strategy.model.tracing.forms.varying import labels_in
from lightning_pfo.strategy.model.tracing.functions import tells_no_values, whose_values_count
from lightning_pfo.strategy.model.tracing.noticing.drawing import draws
from lightning_pfo.strategy.model.tracing.noticing.leaves import is_value
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import Run, Tracked, current_run
from lightning_pfo.strategy.model.tracing.trees import tree_leaves, tree_map_only
from lightning_pfo.strategy.model.variables import users_line, within_metric
from lightning_pfo.strategy.parallel.dtensor import writes


class HeldTensors:
    """The parameters and buffers of a module, known by themselves and by views of them.

    Args:
        owner: The module.
    """

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner
        # the tensors are kept, so that their ids stay theirs
        self._tensors = named_tensors(owner)
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._by_memory = {memory_of(tensor): name for name, tensor in self._tensors.items() if _may_have_views(tensor)}

    def names(self, leaves: Iterable[Any]) -> list[str]:
        """The names of those among some objects."""
        return list(dict.fromkeys(name for name in map(self.name, leaves) if name is not None))

    def tensor(self, name: str) -> torch.Tensor:
        """The parameter or buffer of a name."""
        return self._tensors[name]

    def assigned(self) -> dict[str, torch.Tensor]:
        """Buffers that are other objects now."""
        return {name: b for name, b in self.owner.named_buffers() if self._tensors.get(name) is not b}

    def remember(self, names: Iterable[str]) -> None:
        """Keep the values of those that are parameters; they, or views of them, may be written into."""
        for name in names:
            tensor = self._tensors[name]
            if name not in self._before and isinstance(tensor, nn.Parameter) and not is_placeholder(tensor):
                self._before[name] = (tensor.data, tensor.detach().clone())

    def put_back(self) -> None:
        """Give them these values again."""
        for name, (data, values) in self._before.items():
            data.copy_(values)
            self._tensors[name].data = data

    def name(self, leaf: Any) -> str | None:
        """The name of an object, if it is one of them, stands for one, or is a view of one."""
        name = self._names.get(id(getattr(leaf, "stands_for", leaf)))
        return self._by_memory.get(memory_of(leaf)) if name is None and _may_have_views(leaf) else name


def _may_have_views(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (
        has_memory(leaf) or (is_placeholder(leaf) and leaf.layout == torch.strided)
    )


Place = tuple[nn.Module, str]
"""A module, and the name of one of its attributes."""


class WeightsFollowed(TorchFunctionMode):
    """Lets a run follow some weights: what takes one is an event, as what takes a tracked tensor is.

    What takes one together with tracked tensors takes the value of an event, which another stage may have computed.

    Args:
        run: The run.
        weights: Where the weights are.
    """

    def __init__(self, run: Run, weights: Iterable[Place]) -> None:
        super().__init__()
        self._run = run
        self._weights = {id(getattr(module, name)) for module, name in weights}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if current_run() is self._run and not tells_no_values(func):
            leaves = list(_tensors_in((args, kwargs)))
            if self.takes(func, args, leaves):
                return self.call(func, args, kwargs, leaves)
        return func(*args, **kwargs)

    def takes(self, func: Any, args: Any, leaves: Sequence[Any]) -> bool:
        """Whether a function takes one of the weights."""
        return bool(self._weights) and any(id(leaf) in self._weights for leaf in whose_values_count(func, args, leaves))

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], leaves: Sequence[Any]) -> Any:
        """Call a function that takes some."""
        # `weight.data = tracked` asks the weight alone what it does
        if writes(func, kwargs) or not any(isinstance(leaf, Tracked) for leaf in leaves):
            return self._run.operation(func, args, kwargs)
        args, kwargs = tree_map_only(torch.Tensor, self._as_value, (args, kwargs))
        return func(*args, **kwargs)

    def _as_value(self, leaf: torch.Tensor) -> Any:
        if id(leaf) not in self._weights:
            return leaf
        return self._run.operation(torch.Tensor.view, (leaf, tuple(leaf.shape)), {})


class TensorsSeen(TorchFunctionMode):
    """Notes parameters and buffers that functions are given, or change, without any tracked tensor while a run follows.

    Functions that only make a view do not count: what takes the view does. What takes some weights is followed instead.
    """

    def __init__(
        self,
        run: Run,
        held: HeldTensors,
        see: Callable[[list[Any]], None] | None = None,
        select: Callable[[], None] | None = None,
        followed: Iterable[Place] = (),
        draw: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__()
        self._draw = draw
        self._followed = WeightsFollowed(run, followed)
        self._select = select
        self._run = run
        self.names: dict[str, None] = {}
        self.changed: dict[str, None] = {}
        self._held = held
        self._see = see

    @contextmanager
    def instead(self, run: Run) -> Iterator[dict[str, None]]:
        """Note what is used while another run follows, in what is given out; two of these would take twice as long."""
        before = self._run, self.names, self.changed, self._see, self._select, self._draw
        used: dict[str, None] = {}
        self._run, self.names, self.changed, self._see, self._select, self._draw = run, {}, {}, None, None, None
        try:
            yield used
        finally:
            used |= self.names
            self._run, self.names, self.changed, self._see, self._select, self._draw = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tells_no_values(func) or current_run() is not self._run:  # what a unit is given is its own affair
            return func(*args, **(kwargs or {}))
        if sizes := labels_in(tree_leaves((args, kwargs))):  # an ordinary tensor of such a size may come to any stage
            self._run.decide(sizes)
        leaves = list(_tensors_in((args, kwargs or {})))
        if self._followed.takes(func, args, leaves):
            return self._followed.call(func, args, kwargs or {}, leaves)
        if any(isinstance(leaf, Tracked) for leaf in leaves):
            return func(*args, **(kwargs or {}))
        if self._see is not None:
            self._see(leaves)
        if self._select is not None and selects(func, args):
            self._select()
        names = dict.fromkeys(self._held.names(whose_values_count(func, args, leaves)))
        before = dict(self.names)
        self.names |= names  # also if it fails
        if names and writes(func, kwargs or {}):
            self._held.remember(self._held.names(leaves))
        versions = [change_mark(leaf) if self._held.name(leaf) else (0, 0) for leaf in leaves] if names else []
        with self._draw() if self._draw is not None and draws(func) and within_metric() else nullcontext():
            result = func(*args, **(kwargs or {}))
        for leaf, version in zip(leaves, versions, strict=False):
            if (name := self._held.name(leaf)) and change_mark(leaf) != version:
                self.changed[name] = None
        is_view = isinstance(result, torch.Tensor) and not any(result is leaf for leaf in leaves)
        if names and is_view and self._held.names([result]):
            self.names = before
        return result


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Of the arguments of a function of torch, which takes no containers but these."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _tensors_in(value)


class HeldAsValues:
    """Which values of a trace are parameters and buffers, or views of them, and how the step changes them.

    Args:
        held: The parameters and buffers.
        trace: The trace.

    Attributes:
        names: Of what the call under way is given.
    """

    def __init__(self, held: HeldTensors, trace: Trace) -> None:
        self.names: list[str | None] = []
        self._held = held
        self._trace = trace
        self._of_values: dict[int, str] = {}
        self._of_memory: dict[int, str] = {}
        self._reserved: list[object] = []  # so that memory that is gone has another number than what comes after it
        self._changed: dict[str, nn.Parameter] = {}  # weights that are followed, and have not been used since

    def given(self, leaves: Iterable[Any]) -> None:
        """A call is given something."""
        self.names = [*map(self._held.name, leaves)]

    def note_memory(self, leaves: Iterable[Any]) -> None:
        """Remember where what the call is given lies, of a placeholder the zeros that stand for it."""
        for name, leaf in zip(self.names, leaves, strict=True):
            if name is not None and has_memory(leaf) and memory_of(leaf) not in self._of_memory:
                self._of_memory[memory_of(leaf)] = name
                self._reserved.append(reserved_memory(leaf))

    def note(self, value: Tracked, name: str | None) -> None:
        """A value is one of them."""
        if name is not None:
            self._of_values[value.label] = name

    def note_view(self, value: Tracked, memory: int) -> None:
        """A value lies somewhere, perhaps where one of them does."""
        self.note(value, self._of_memory.get(memory))

    def name(self, leaf: Any) -> str | None:
        """The name of what a function is given."""
        return self._of_values.get(leaf.label) if is_value(leaf) else self._held.name(leaf)

    def change(self, name: str | None) -> None:
        """The latest event has changed one."""
        if name is None:
            return
        self._trace.changes.setdefault(name, []).append((len(self._trace.events) - 1, users_line()))
        weight = self._held.tensor(name)
        if self._trace.weights and isinstance(weight, nn.Parameter):
            self._changed[name] = weight

    def note_unit(self, unit: Any, position: int) -> None:
        """A unit is called that may have some which the step has changed before."""
        changes = self._trace.changes
        for name in self._held.names(named_tensors(unit.module).values()) if changes else ():
            if name in changes:
                self._trace.used_changed.setdefault(name, []).append(position)

    def use_changed(self, event: Event) -> None:
        """Note that the step goes on with weights that it has changed by itself, if an event that begins uses some."""
        changed = self._changed
        if not changed or getattr(self._held.owner, "automatic_optimization", True):
            return  # one that optimizes by itself has phases
        parameters = [parameter for unit in event.units for parameter in unit.module.parameters()]
        if not changed.keys().isdisjoint({*event.held, *self._held.names(parameters)}):
            self._trace.optimize(None, changed.values(), changed, users_line())
            self._changed = {}
