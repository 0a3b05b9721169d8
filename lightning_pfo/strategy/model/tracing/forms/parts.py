"""What an object consists of of which torch's trees know nothing, and how it is made anew of that.

Objects consist of their attributes, in `__dict__` and in slots; subclasses of dict, list, tuple and deque of their
items too. So one that holds tensors, however deep, is taken apart like the containers that torch knows.
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pfo.strategy.model.variables import changes_by_itself, is_library

_NEVER = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
"""Types of values that hold no tensors, nearly always."""
_CLOSED = (type, torch.Tensor, nn.Module, np.ndarray, types.ModuleType, types.FunctionType, types.MethodType)
_DICTS: tuple[Any, ...] = (OrderedDict, defaultdict, dict)
_BASES: tuple[Any, ...] = (*_DICTS, list, deque, tuple)
_MADE_OF: dict[Any, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    types.MappingProxyType: (lambda value: (dict(value),), types.MappingProxyType),
    functools.partial: (
        lambda value: (value.func, value.args, value.keywords),
        lambda function, args, kwargs: functools.partial(function, *args, **kwargs),
    ),
}
"""Types whose objects cannot be changed: what they consist of, and what makes them of it."""
_DEEPEST = 8
_LONGEST = 1000
"""Longer containers are data, which nobody looks into."""
_MOST = 300
"""So many containers and objects are looked into for one object."""


@dataclass(frozen=True)
class Parts:
    """How an object is made anew of its parts.

    Attributes:
        kind: The name of its class.
        keys: Of its items: keys of a dict, else their numbers.
        names: Of its attributes that are parts.
        around: Attributes that are objects around it, or itself: name, how many objects are around that one, and
            whether it is a weak reference.
        template: Its class; or what is to be copied.
    """

    kind: str
    keys: tuple[Any, ...]
    names: tuple[str, ...]
    around: tuple[tuple[str, int, bool], ...]
    template: Any = field(repr=False, compare=False)

    def begin(self) -> Any:
        """A new object without its parts; None: it is made when these are there."""
        if not isinstance(self.template, type):
            return copy.copy(self.template)
        base = _base_of(self.template)
        if self.template in _MADE_OF or base is tuple:
            return None
        return (base or object).__new__(self.template)

    def finish(self, made: Any, values: Sequence[Any], around: Sequence[Any]) -> Any:
        """The object, with its parts.

        Args:
            made: What `begin` has returned.
            values: Its items and attributes.
            around: The objects around it, the outermost first.
        """
        kind: Any = self.template if isinstance(self.template, type) else type(made)
        if kind in _MADE_OF:
            return _MADE_OF[kind][1](*values)
        base, items = _base_of(kind), values[: len(self.keys)]
        if base is tuple:
            made = tuple.__new__(kind, items)
        elif base in _DICTS:
            for key, value in zip(self.keys, items, strict=True):
                base.__setitem__(made, key, value)
        elif base is not None:
            base.extend(made, items)
        for name, value in zip(self.names, values[len(self.keys) :], strict=True):
            object.__setattr__(made, name, value)
        for name, index, is_weak in self.around:
            other = [*around, made][index]
            object.__setattr__(made, name, weakref.ref(other) if is_weak else other)
        return made


class Opened:
    """A function that a layer has returned; what has tensors in its closure and its defaults are attributes of it.

    Args:
        function: The function.
        held: What of these has tensors, see `cells_of` and `defaults_of`.
    """

    def __init__(self, function: types.FunctionType, held: Mapping[str | int, Any]) -> None:
        self._held = dict(held)
        self._bare, _ = _with(function, dict.fromkeys(held))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the tensors that are there now."""
        function, cells = _with(self._bare, self._held)
        try:
            return function(*args, **kwargs)
        finally:  # it may assign them (`nonlocal`)
            self._held.update({name: cell.cell_contents for name, cell in cells.items()})


def cells_of(function: types.FunctionType) -> dict[str | int, types.CellType]:
    """The closure of a function, by the names of its variables."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def defaults_of(function: types.FunctionType) -> dict[str | int, Any]:
    """The defaults of a function, by number and `name=`."""
    by_number: dict[str | int, Any] = dict(enumerate(function.__defaults__ or ()))
    return by_number | {f"{name}=": value for name, value in (function.__kwdefaults__ or {}).items()}


def _with(function: types.FunctionType, held: Mapping[Any, Any]) -> tuple[Any, dict[Any, types.CellType]]:
    """The function with something else in its closure and its defaults, and the cells of it."""
    before = cells_of(function)
    cells = {name: types.CellType(held[name]) for name in before if name in held}
    defaults = {name: held.get(name, value) for name, value in defaults_of(function).items()}
    made = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        tuple(value for name, value in defaults.items() if isinstance(name, int)),
        tuple((before | cells).values()),
    )
    made.__kwdefaults__ = {name[:-1]: value for name, value in defaults.items() if isinstance(name, str)}
    return made, cells


def parts_of(value: Any, around: Sequence[Any] = ()) -> tuple[Parts, list[Any]] | None:
    """What an object with tensors is made of, and its parts; None: it has none, or stays as it is.

    Args:
        value: The object.
        around: The objects that it is a part of, which it may refer to.
    """
    kind: Any = type(value)
    if not is_open(value) or any(value is other for other in around) or not holds_tensor(value):
        return None
    if kind in _MADE_OF:
        values = _MADE_OF[kind][0](value)
        return Parts(kind.__qualname__, tuple(range(len(values))), (), (), kind), list(values)
    items, attributes = items_of(value), attributes_of(value)
    back = _leading_back(attributes, (*around, value))
    for name, _, _ in back:
        del attributes[name]
    template = _template(value, attributes)
    if template is None:
        return None
    parts = Parts(kind.__qualname__, tuple(items), tuple(attributes), back, template)
    return parts, [*items.values(), *attributes.values()]


def _leading_back(attributes: dict[str, Any], around: Sequence[Any]) -> tuple[tuple[str, int, bool], ...]:
    found = []
    for name, attribute in attributes.items():
        if type(attribute) in _NEVER or isinstance(attribute, torch.Tensor):
            continue
        other = attribute() if isinstance(attribute, weakref.ref) else attribute
        found += [(name, index, other is not attribute) for index, each in enumerate(around) if other is each]
    return tuple(found)


def is_made_at_once(value: Any) -> bool:
    """Whether an object cannot be changed, so that a new one is made where its parts change."""
    return isinstance(value, tuple) or type(value) in _MADE_OF


def is_open(value: Any) -> bool:
    """Whether objects like it are looked into."""
    kind: Any = type(value)
    return kind not in _NEVER and _is_open(kind)


@functools.cache
def _is_open(kind: Any) -> bool:
    if kind in _MADE_OF:
        return True
    is_closed = issubclass(kind, _CLOSED) or (changes_by_itself(kind) and not kind.__module__.startswith("torch"))
    return not is_closed or kind in (types.SimpleNamespace, Opened)


@functools.cache
def _base_of(kind: Any) -> Any:
    return next((base for base in kind.__mro__ if base in _BASES), None)


def items_of(value: Any) -> dict[Any, Any]:
    """The items of a dict, list, tuple or deque, or an object of a class that is one; by key, or by number."""
    kind: Any = type(value)
    base = _base_of(kind)
    return {} if base is None else dict(base.items(value)) if base in _DICTS else dict(enumerate(base.__iter__(value)))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in `__dict__` and slots."""
    kind: Any = type(value)
    own = {**getattr(value, "__dict__", {})}
    for name in slots_of(kind):
        if hasattr(value, name):
            own[name] = getattr(value, name)
    return own


@functools.cache
def slots_of(kind: Any) -> tuple[str, ...]:
    """The names of the slots of a class."""
    own = {
        name: None
        for base in kind.__mro__
        if "__slots__" in vars(base) and base not in _BASES
        for name, value in vars(base).items()
        if isinstance(value, types.MemberDescriptorType)
    }
    return (*own, *(("default_factory",) if issubclass(kind, defaultdict) else ()))


def holds_tensor(value: Any) -> bool:
    """Whether an object or container holds a tensor, at any depth that is looked into."""
    for each in getattr(value, "__dict__", {}).values():  # nearly always one of these
        if isinstance(each, torch.Tensor):
            return True
    return next(found_in(value, _is_tensor), None) is not None


def found_in(value: Any, is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """What is wanted of an object or container and all in it, as deep as is looked; the outermost first.

    Args:
        value: The object or container.
        is_wanted: Whether something is; what is wanted is not looked into.
    """
    waiting: list[Any] = [value]
    seen: set[int] = set()
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in waiting:
            if type(each) in _NEVER:
                continue
            if is_wanted(each):
                yield each
            elif id(each) not in seen and len(seen) < _MOST:
                seen.add(id(each))
                inner += _contents(each, is_first=each is value)
        waiting = inner


def leads_back(value: Any) -> bool:
    """Whether an object is in itself, as deep as is looked."""
    inside = _contents(value, is_first=True)
    return any(True for each in inside for _ in found_in(each, lambda found: found is value))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _contents(value: Any, *, is_first: bool) -> Iterable[Any]:
    kind: Any = type(value)
    if kind is dict:
        return islice(value.values(), _LONGEST)
    if kind is list or kind is tuple:
        return islice(value, _LONGEST)
    if not (kind in _BASES or is_open(value)):
        return ()
    if kind in _MADE_OF:
        return _MADE_OF[kind][0](value)
    if is_cache(kind):
        return [each for each in _shallow(value) if isinstance(each, torch.Tensor)] if is_first else ()
    return [*islice(items_of(value).values(), _LONGEST), *attributes_of(value).values()]


@functools.cache
def is_cache(kind: Any) -> bool:
    """Whether it is a library's cache of keys and values.

    Each layer finds in it what it has put there itself, on its own stage: nothing of it is to be sent.
    """
    return any(base.__name__.endswith("Cache") and is_library(base.__module__) for base in kind.__mro__)


def _shallow(value: Any) -> Iterator[Any]:
    """What is in attributes, and in containers in these."""
    for attribute in attributes_of(value).values():
        held = list(attribute.values()) if isinstance(attribute, dict) else attribute
        yield from held if isinstance(held, (list, tuple)) else (held,)


def _template(value: Any, attributes: Iterable[str]) -> Any:
    """The class, if objects of it can be made of nothing; else a copy without parts; None: neither can be made."""
    kind: Any = type(value)
    if _is_made_of_nothing(kind):
        return kind
    try:
        empty = copy.copy(value)
        for name in attributes:
            object.__setattr__(empty, name, None)
    except Exception:  # objects decide themselves how they are copied
        return None
    return empty if empty is not value and type(empty) is kind else None


@functools.cache
def _is_made_of_nothing(kind: Any) -> bool:
    if _base_of(kind) is not None:
        return True
    try:
        object.__new__(kind)
    except TypeError:  # it has more than Python sees
        return False
    return True
