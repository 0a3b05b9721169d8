"""What is to be noticed while a step is traced and is no function of torch with a tracked tensor."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.model.tracing.ends import differentiates_later
from lightning_pfo.strategy.model.tracing.forms.hidden import HidingError
from lightning_pfo.strategy.model.tracing.forms.selecting import selects
from lightning_pfo.strategy.model.tracing.forms.varying import labels_in
from lightning_pfo.strategy.model.tracing.functions import tells_no_values, whose_values_count
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import Run, Tracked, current_run
from lightning_pfo.strategy.model.tracing.trees import tree_leaves, tree_map_only
from lightning_pfo.strategy.parallel.compat import (
    Recompute,
    change_mark,
    memory_of,
    named_tensors,
    recompute_with,
    transform_with,
)
from lightning_pfo.strategy.parallel.dtensor import writes
from lightning_pfo.strategy.parallel.patches import Patches


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
        """The name of an object, if it is one of them or a view of one."""
        name = self._names.get(id(leaf))
        return self._by_memory.get(memory_of(leaf)) if name is None and _may_have_views(leaf) else name


def _may_have_views(leaf: Any) -> bool:
    return (type(leaf) in (torch.Tensor, nn.Parameter) or is_placeholder(leaf)) and leaf.layout == torch.strided


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
    ) -> None:
        super().__init__()
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
        before = self._run, self.names, self.changed, self._see, self._select
        used: dict[str, None] = {}
        self._run, self.names, self.changed, self._see, self._select = run, {}, {}, None, None
        try:
            yield used
        finally:
            used |= self.names
            self._run, self.names, self.changed, self._see, self._select = before

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


@contextmanager
def functions_followed(run: Run) -> Iterator[None]:
    """Let a run follow what is no function of torch: `autograd.Function`s, scripted functions, `torch.vmap`."""
    original = torch.autograd.Function.__dict__["apply"]
    script = torch.jit.ScriptFunction
    original_script = script.__call__

    def call_script(function: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_run()
        if current is None or not any(isinstance(v, Tracked) for v in tree_leaves((args, kwargs))):
            return original_script(function, *args, **kwargs)
        return current.operation(AppliedFunction(function, original_script), args, kwargs)

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_run()
        call = AppliedFunction(cls, original)
        if (
            current is None
            or _keeps_inputs(cls)
            or not any(isinstance(v, Tracked) for v in tree_leaves((args, kwargs)))
        ):
            return call(*args, **kwargs)
        return current.operation(call, args, kwargs)

    def transform(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        function = AppliedFunction(name, original)

        def call(*args: Any, **kwargs: Any) -> Any:
            current = current_run()
            given = args, kwargs, _captured(args[0])
            goes_on = name == "vjp"  # in a function that it returns
            _transforms.append(name)
            try:
                if goes_on or current is None or not any(isinstance(v, Tracked) for v in tree_leaves(given)):
                    return original(*args, **kwargs)
                return current.operation(function, given, {})
            except InTransformError:
                if current is None or len(_transforms) > 1:  # who called the outermost one follows it
                    raise
                if goes_on:
                    raise HidingError(differentiates_later()) from None
                return current.operation(function, given, {})
            finally:
                _transforms.pop()

        return call

    patches = Patches()
    transform_with(transform, patches)
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    script.__call__ = call_script  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        patches.close()
        script.__call__ = original_script  # type: ignore[method-assign]
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


_transforms: list[str] = []


def _captured(function: Any) -> list[Any]:
    """What a function has of the code around it."""
    cells = getattr(function, "__closure__", None) or ()
    found = []
    for cell in cells:
        with suppress(ValueError):  # it is empty
            found.append(cell.cell_contents)
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tracked)]


class InTransformError(Exception):
    """A unit is called inside of `torch.vmap` and the like, which nobody has followed yet."""


def in_transform() -> bool:
    """Whether `torch.vmap` or the like is under way."""
    return bool(_transforms)


def leave_transform() -> None:
    """Let `torch.vmap` and the like be followed as a whole, if a unit is called inside of it.

    Raises:
        InTransformError: If it is not followed yet; who called it follows it then.
    """
    if _transforms:
        raise InTransformError(_transforms[-1])


def _keeps_inputs(cls: Any) -> bool:
    """Whether it only keeps what a checkpoint recomputes from, as one without reentrance has done up to torch 2.9."""
    checkpoint = torch.utils.checkpoint
    return cls.__module__ == checkpoint.__name__ and cls is not checkpoint.CheckpointFunction


def recomputation_noted(run: Run, events: Sequence[Any], found: list[tuple[int, int]]) -> Patches:
    """Note which events of a trace are recomputed together, until what is returned is closed."""

    def make(original: Recompute) -> Recompute:
        def around(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
            start = len(events)
            yield from original(*args, **kwargs)
            if current_run() is run and len(events) > start + 1:
                found.append((start, len(events)))

        return around

    patches = Patches()
    recompute_with(make, patches)
    return patches


ABSENT = object()
"""Stands for an attribute that a module does not have."""
_SWITCHES = (bool, int, float, str, type(None), Enum)


def switches_noted(run: Run, found: dict[tuple[nn.Module, str], Any]) -> Patches:
    """Note what was in the plain attributes of modules that the step itself sets, until what is returned is closed."""
    original: Any = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if current_run() is run and isinstance(value, _SWITCHES):
            before = vars(module).get(name, ABSENT)
            if before is ABSENT or (isinstance(before, _SWITCHES) and before != value):
                found.setdefault((module, name), before)
        original(module, name, value)

    patches = Patches()
    patches.set(nn.Module, "__setattr__", set_attribute)
    return patches


def switched_back(found: Mapping[tuple[nn.Module, str], Any]) -> list[tuple[nn.Module, str]]:
    """Of noted attributes those that are again as they were; of an absent one, where it is gone."""
    return [place for place, before in found.items() if vars(place[0]).get(place[1], ABSENT) == before]


@contextmanager
def switches_kept(places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Put attributes back, however the context is left: a stage that ends a step early does not do what is behind."""
    before = [(vars(module), name, vars(module).get(name, ABSENT)) for module, name in places]
    try:
        yield
    finally:
        for attributes, name, value in before:
            if value is ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value


@dataclass(frozen=True)
class AppliedFunction:
    """An `autograd.Function`, a scripted function of the user, or `torch.vmap` and the like, as a function of torch.

    Attributes:
        cls: The function; of torch's own the name.
        original: torch's own `apply`, as it stands in the class; of scripted functions their `__call__`.
    """

    cls: Any
    original: Any = field(compare=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        if isinstance(self.cls, type):
            return self.original.__get__(None, self.cls)(*args, **kwargs)
        if isinstance(self.cls, str):
            given, named, _ = args
            return self.original(*given, **named)
        return self.original(self.cls, *args, **kwargs)


def is_transform(function: Any) -> bool:
    """Whether a function is `torch.vmap` or the like."""
    return isinstance(function, AppliedFunction) and isinstance(function.cls, str)


def is_value(leaf: Any) -> bool:
    """Whether something is a tracked tensor that the trace knows."""
    return isinstance(leaf, Tracked) and leaf.label >= 0
