"""What is the user's own, and which variables the functions of a user's class know besides their arguments."""

from __future__ import annotations

import argparse
import sys
import sysconfig
import types
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
_NO_OBJECTS = (type, nn.Module, torch.Tensor, BaseException, types.ModuleType, types.FunctionType, types.MethodType)
_NOT_THE_USERS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_pfo", "builtins")
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_object_of_user(value: Any, packages: frozenset[str]) -> bool:
    """Whether an object is of a class of the user's own: of no library, or of that which the user's module is of."""
    kind: Any = type(value)
    return _is_of_user(kind, packages)


@cache
def _is_of_user(cls: type, packages: frozenset[str]) -> bool:
    if issubclass(cls, _NO_OBJECTS):
        return False
    if issubclass(cls, _HOLDERS):
        return True
    has_attributes = any("__dict__" in vars(base) or "__slots__" in vars(base) for base in cls.__mro__[:-1])
    return has_attributes and not is_of_library(cls, packages)


def is_of_library(what: Any, packages: Collection[str]) -> bool:
    """Whether a class or function is of a library, other than those that the user's module is of."""
    return _package_of(what) not in packages and _is_library(what.__module__)


@cache
def _is_library(module: str) -> bool:
    if module.partition(".")[0] in _NOT_THE_USERS:
        return True
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or file.startswith(_LIBRARIES) or "-packages" in file


def _package_of(what: Any) -> str:
    return str(what.__module__).partition(".")[0]


def packages_of(module: nn.Module) -> frozenset[str]:
    """The packages that the classes of a user's module come from."""
    kind: Any = type(module)
    return _packages_of(kind)


@cache
def _packages_of(cls: type) -> frozenset[str]:
    return frozenset(map(_package_of, cls.__mro__)) - {*_NOT_THE_USERS, *sys.stdlib_module_names}


class Variables(MutableMapping[str, Any]):
    """Some variables or attributes as a dict, which changes them."""

    def __init__(
        self,
        names: Collection[str],
        get: Callable[[str], Any],
        put: Callable[[str, Any], object],
        drop: Callable[[str], object],
    ) -> None:
        self._names, self._get, self._put, self._drop = names, get, put, drop

    def __getitem__(self, name: str) -> Any:
        try:
            return self._get(name)
        except (AttributeError, ValueError) as error:  # a slot or a cell that is empty
            raise KeyError(name) from error

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._drop(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Known:
    """What the functions of a user's class know that a step may call, and the user's functions that these call.

    Attributes:
        variables: Global variables that they name, and those of functions around them.
        names: All names in them, also of attributes.
    """

    variables: list[tuple[str, Variables]]
    names: frozenset[str]


_KNOWN: WeakKeyDictionary[type, Known] = WeakKeyDictionary()
_BEGINS = ("training_step", "validation_step", "test_step", "predict_step", "forward")


def known_to(cls: type) -> Known:
    """What functions of a user's class know."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _find_known(cls)
    return _KNOWN[cls]


def _find_known(cls: type) -> Known:
    packages = _packages_of(cls)
    found: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
    cells: dict[str, Any] = {}
    all_names: set[str] = set()

    def methods(name: str) -> Iterator[Any]:
        return (_function_of(vars(base)[name]) for base in cls.__mro__ if name in vars(base))

    waiting = [method for name in _BEGINS for method in methods(name)]
    seen: set[types.FunctionType] = set()
    while waiting:
        function = waiting.pop()
        if function is None or function in seen or function.__module__ is None:
            continue
        seen.add(function)
        if is_of_library(function, packages):
            continue
        variables = function.__globals__
        _, names = found.setdefault(id(variables), (variables, {}))
        for name in _names_in(function.__code__):
            if name not in all_names:
                all_names.add(name)
                waiting.extend(methods(name))
            value = variables.get(name)
            if name in variables and _may_change(value):
                names[name] = None
            waiting.append(_function_of(value))
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and (value := _content(cell)) is not cell and _may_change(value):
                cells.setdefault(name, cell)
            waiting.append(_function_of(_content(cell)))
    known = [
        (f"the variables of {variables['__name__']}", Variables(list(names), *_accessors(variables)))
        for variables, names in found.values()
        if names
    ]
    if cells:
        get, put, drop = (partial(how, cells) for how in (_get_cell, _put_cell, _drop_cell))
        known.append((f"the variables around {cls.__name__}", Variables(list(cells), get, put, drop)))
    return Known(known, frozenset(all_names))


def _accessors(variables: dict[str, Any]) -> tuple[Any, Any, Any]:
    return variables.__getitem__, variables.__setitem__, variables.__delitem__


def _get_cell(cells: dict[str, Any], name: str) -> Any:
    return cells[name].cell_contents


def _put_cell(cells: dict[str, Any], name: str, value: Any) -> None:
    cells[name].cell_contents = value


def _drop_cell(cells: dict[str, Any], name: str) -> None:
    del cells[name].cell_contents


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return cell


def _may_change(value: Any) -> bool:
    return not isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, nn.Module))


def _function_of(value: Any) -> Any:
    """The function that a method, property or decorated function is made of; None for others."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    if isinstance(value, property):
        value = value.fget
    while hasattr(value, "__wrapped__") and not isinstance(value, type):
        value = value.__wrapped__
    return value if isinstance(value, types.FunctionType) else None


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
