"""What a call has done, for ranks that have not run it: what it returns, and what it has changed or left.

It may write into its arguments (a tensor in place, a list, a cache of keys and values), and leave tensors in modules.
What it was given and has not changed is not sent. In a library's cache each layer finds what it has put there itself,
so that others are told the form of that only; code around layers asks how long the cache is.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import change_mark
from lightning_pfo.strategy.model.tracing.forms.left import Place, roots_of
from lightning_pfo.strategy.model.tracing.forms.parts import attributes_of, is_cache
from lightning_pfo.strategy.model.units import Unit

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, and its named ones."""
_HELD = (torch.Tensor, nn.Module, FunctionType)
_CONTAINERS = (dict, list, deque, set)


class Told(NamedTuple):
    """What other ranks are told of a call.

    Attributes:
        data: What it returned, its arguments if it has changed them, and what it has left where; pickled, but for ...
        tensors: The tensors of these that others do not have.
    """

    data: bytes
    tensors: list[torch.Tensor]


class Given:
    """The arguments of a call, as they are before it.

    Args:
        arguments: Its arguments and named arguments.
        modules: The modules of the model by id, which are not sent.
    """

    def __init__(self, arguments: Arguments, modules: Mapping[int, nn.Module]) -> None:
        self._arguments = arguments
        self._held = _Held(modules)
        try:
            self._before = _without_tensors(arguments, self._held)
        except Exception:  # objects decide themselves how they are pickled; changes in such arguments stay unknown
            self._before = b""
        self._held.see()

    def told(self, result: Any, left: Sequence[tuple[Place, list[Any]]], unit: Unit) -> Told:
        """What others are told, where the call has run; lists get back what was taken from them.

        Args:
            result: What it has returned.
            left: What it has left, as `Kept` has found it.
            unit: What was called.

        Raises:
            ConfigurationError: If something of it cannot be sent.
        """
        for place, values in left:
            if place.added:
                place.fill(values)
        numbers = {id(root): number for number, root in enumerate(roots_of(unit.module))} if left else {}
        places = [((numbers[id(at.root)], at.path, at.keys, at.added), values) for at, values in left]
        writer = _Writer(self._held)
        try:
            has_changed = self._before and (
                self._held.changed() or _without_tensors(self._arguments, self._held, is_first=False) != self._before
            )
            data = _written((result, self._arguments if has_changed else None, places), writer)
        except Exception as error:
            raise ConfigurationError(
                f"{unit.name!r} is called where all ranks need what it returns and changes, which cannot be sent to "
                f"them: {error} Let it return tensors, and containers or objects of them that can be pickled."
            ) from error
        return Told(data, writer.tensors)

    def after(self, told: Told, unit: Unit, device: torch.device) -> Any:
        """Change and leave what a call has, where it was not run; returns what it returned.

        Args:
            told: What it has done.
            unit: What was called.
            device: Where this rank computes.
        """
        result, arguments, places = _Reader(told, self._held, device).load()
        if arguments is not None:
            own: dict[int, Any] = {}
            _adopted(self._arguments, arguments, own)
            result = _settled(result, own)
        roots = roots_of(unit.module) if places else []
        for (number, *where), values in places:
            Place(roots[number], *where).fill(values)
        return result


class _Held:
    """What all ranks have in their arguments, each in the place of the others': modules, functions and tensors."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.values: list[Any] = list(modules.values())
        self.numbers = {key: number for number, key in enumerate(modules)}
        self._marks: list[object] = []

    def add(self, value: Any) -> int:
        """The number of something that there is before the call."""
        number = self.numbers.setdefault(id(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def see(self) -> None:
        """Note how tensors are, now that all have a number."""
        self._marks = list(map(_mark, self.values))

    def changed(self) -> bool:
        """Whether any tensor has been changed in place."""
        return any(self.has_changed(number) for number in range(len(self.values)))

    def has_changed(self, number: int) -> bool:
        """Whether that one has."""
        return _mark(self.values[number]) != self._marks[number]


def _mark(value: Any) -> object:
    return change_mark(value) if isinstance(value, torch.Tensor) else None


class _Look(pickle.Pickler):
    """Writes how arguments are, so that it can be told whether they have changed."""

    def __init__(self, held: _Held, *, is_first: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self._held, self._is_first = held, is_first

    @override
    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, _HELD):
            return None
        return self._held.add(obj) if self._is_first else self._held.numbers.get(id(obj), -1)


class _Writer(pickle.Pickler):
    """Writes for other ranks."""

    def __init__(self, held: _Held) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []
        self._held = held
        self._sent: dict[int, tuple[Any, ...]] = {}
        self._in_caches: set[int] = set()

    @override
    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        if not isinstance(obj, _HELD):
            if is_cache(cast(Any, type(obj))) and id(obj) not in self._in_caches:
                self._in_caches |= {id(obj), *_tensors_in(obj)}
            return None
        number = self._held.numbers.get(id(obj))
        if number is not None and not self._held.has_changed(number):
            return "held", number
        if not isinstance(obj, torch.Tensor) or obj.layout != torch.strided or obj.is_nested:
            return None
        if id(obj) not in self._sent:
            if number is None and id(obj) in self._in_caches:
                self._sent[id(obj)] = "form", obj.shape, obj.dtype, obj.is_cpu
            else:
                self._sent[id(obj)] = "sent", len(self.tensors), number
                self.tensors.append(obj.detach())
        return self._sent[id(obj)]


class _Reader(pickle.Unpickler):
    def __init__(self, told: Told, held: _Held, device: torch.device) -> None:
        super().__init__(io.BytesIO(told.data))
        self._tensors, self._held, self._device = told.tensors, held, device

    @override
    def persistent_load(self, pid: Any) -> Any:
        what, *about = pid
        if what == "held":
            return self._held.values[about[0]]
        if what == "form":
            shape, dtype, is_on_cpu = about
            return torch.zeros((), dtype=dtype, device="cpu" if is_on_cpu else self._device).expand(shape)
        index, number = about
        tensor = self._tensors[index]
        own = None if number is None else self._held.values[number]
        if own is None or own.shape != tensor.shape or 0 in own.stride():  # a form has no room for values
            return tensor
        own.detach().copy_(tensor)
        return own


def _tensors_in(value: Any) -> set[int]:
    held = _Held({})
    _without_tensors(value, held)
    return {id(each) for each in held.values if isinstance(each, torch.Tensor)}


def _without_tensors(value: Any, held: _Held, *, is_first: bool = True) -> bytes:
    return _written(value, _Look(held, is_first=is_first))


def _written(value: Any, pickler: _Look | _Writer) -> bytes:
    pickler.dump(value)
    return pickler.file.getvalue()


def _adopted(own: Any, other: Any, done: dict[int, Any]) -> Any:
    """What stands in the place of `own` so that its content is that of `other`: itself, where it can be changed."""
    if id(other) in done:
        return done[id(other)]
    attributes = attributes_of(other)
    is_plain = not (attributes or isinstance(other, (*_CONTAINERS, tuple)))
    if own is other or type(own) is not type(other) or is_plain or isinstance(own, _HELD):
        return other
    done[id(other)] = own
    if isinstance(own, dict):
        items: Any = {k: _adopted(own[k], value, done) if k in own else value for k, value in other.items()}
        own.clear()
        own.update(items)
    elif isinstance(own, set):
        own.clear()
        own.update(other)
    elif isinstance(own, (list, deque, tuple)):
        mine = dict(enumerate(own))
        items = [_adopted(mine[n], value, done) if n in mine else value for n, value in enumerate(other)]
        if isinstance(own, tuple):
            is_same = len(items) == len(own) and all(map(is_, items, own))
            done[id(other)] = made = own if is_same else _tuple_of(type(own), items)
            return made
        own.clear()
        own.extend(items)
    for name in attributes_of(own).keys() - attributes.keys():
        object.__delattr__(own, name)
    for name, value in attributes.items():
        object.__setattr__(own, name, _adopted(getattr(own, name, None), value, done))
    return own


def _settled(value: Any, own: Mapping[int, Any]) -> Any:
    """A result with the arguments of this rank in the place of those that it was sent with."""
    if id(value) in own:
        return own[id(value)]
    if isinstance(value, dict):
        for key, item in list(value.items()):
            if (settled := _settled(item, own)) is not item:
                value[key] = settled
    elif isinstance(value, list):
        value[:] = [_settled(item, own) for item in value]
    elif isinstance(value, tuple):
        items = [_settled(item, own) for item in value]
        return value if all(map(is_, items, value)) else _tuple_of(type(value), items)
    return value


def _tuple_of(kind: Any, items: list[Any]) -> Any:
    return kind(*items) if hasattr(kind, "_fields") else kind(items)
