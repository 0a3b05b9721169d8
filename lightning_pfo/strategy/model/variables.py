"""What is the user's own, and which variables the functions of a user's class know besides their arguments."""

from __future__ import annotations

import argparse
import inspect
import linecache
import sys
import sysconfig
import traceback
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, MutableMapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

HOLDERS = (types.SimpleNamespace, argparse.Namespace)
"""Classes of attributes that the user names."""
_NO_OBJECTS = (type, nn.Module, torch.Tensor, BaseException, types.ModuleType, types.FunctionType, types.MethodType)
_NOT_THE_USERS = ("torch", "lightning", "pytorch_lightning", "torchmetrics", "lightning_pfo", "builtins")
_NOT_THE_USERS_FILES = str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), "<"
_CHANGE_BY_THEMSELVES = frozenset(
    (
        *("torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_pfo", "accelerate", "logging"),
        *("threading", "_thread", "_contextvars", "queue", "multiprocessing", "concurrent", "asyncio", "weakref"),
        *("subprocess", "socket", "tqdm"),
        *("builtins", "functools", "enum", "re", "types", "typing", "abc", "pathlib", "datetime", "decimal", "numpy"),
    )
)
"""Packages whose objects threads and trainers change, or nobody does."""
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def is_object_of_user(value: Any, packages: frozenset[str]) -> bool:
    """Whether an object is of a class of the user's own: of no library, or of that which the user's module is of."""
    kind: Any = type(value)
    return _is_of_user(kind, packages)


@cache
def _is_of_user(cls: type, packages: frozenset[str]) -> bool:
    if issubclass(cls, _NO_OBJECTS):
        return False
    if issubclass(cls, HOLDERS):
        return True
    has_attributes = any("__dict__" in vars(base) or "__slots__" in vars(base) for base in cls.__mro__[:-1])
    return has_attributes and not is_of_library(cls, packages)


def is_of_library(what: Any, packages: Collection[str]) -> bool:
    """Whether a class or function is of a library, other than those that the user's module is of."""
    return _package_of(what) not in packages and is_library(what.__module__)


@cache
def is_library(module: str) -> bool:
    """Whether a module is of a library, by its name."""
    if _package_of_name(module) in _NOT_THE_USERS:
        return True
    if module == "__main__":
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is None or file.startswith(_LIBRARIES) or "-packages" in file


def _package_of(what: Any) -> str:
    return _package_of_name(str(what.__module__))


def _package_of_name(module: str) -> str:
    return module.partition(".")[0]


def changes_by_itself(cls: type) -> bool:
    """Whether objects of a class change beside what a step does with them, or never; `bytearray` is one that may."""
    return _package_of(cls) in _CHANGE_BY_THEMSELVES and cls is not bytearray


def packages_of(module: Any) -> frozenset[str]:
    """The packages that the classes of a user's module, or another object, come from."""
    kind: Any = type(module)
    return _packages_of(kind)


@cache
def _packages_of(cls: type) -> frozenset[str]:
    return frozenset(map(_package_of, cls.__mro__)) - {*_NOT_THE_USERS, *sys.stdlib_module_names}


def users_line(error: BaseException | None = None) -> str:
    """The innermost line of the stack, or of where an error was raised, that is neither torch's nor this package's."""
    stack = _stack() if error is None else reversed([*traceback.walk_tb(error.__traceback__)])
    for frame, line in stack:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_USERS_FILES) and "contextlib" not in file:
            return f"{file}:{line}: {linecache.getline(file, line, frame.f_globals).strip()}"
    return _UNKNOWN


def told_of_error(error: BaseException) -> str:
    """An error of the user's code, for messages, with its line if it has one."""
    line, text = users_line(error), f"{type(error).__name__}: {error}"
    return f"{text.removesuffix('.')}." if line == _UNKNOWN else f"{text}, at {line}"


_UNKNOWN = "an unknown line"


def _stack() -> Iterator[tuple[types.FrameType, int]]:
    """The calls under way, the innermost first; `walk_stack` on its own leaves out some, others in each Python."""
    return traceback.walk_stack(inspect.currentframe())


def users_module() -> nn.Module | None:
    """The module of whose method a line the user has written is running, the innermost one."""
    for frame, _ in _stack():
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module) and not code.co_filename.startswith(_NOT_THE_USERS_FILES):
            return first
    return None


def within_metric() -> bool:
    """Whether a method of a torchmetrics object is running, by the file that wraps them: it is asked many times.

    Those of wrappers around other metrics are not wrapped.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    parts = (getattr(torchmetrics, name, None) for name in ("metric", "wrappers"))  # while it is imported it has none
    files = tuple(str(part.__file__).removesuffix("__init__.py") for part in parts if part is not None)
    return bool(files) and any(frame.f_code.co_filename.startswith(files) for frame, _ in _stack())


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

    def joined(self, others: Variables) -> Variables:
        """With others of the same module, class or function."""
        return Variables(list(dict.fromkeys([*self._names, *others._names])), self._get, self._put, self._drop)

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


class AllBut(Variables):
    """The items of a dict, now and later, but some.

    Args:
        items: The dict.
        is_left_out: Tells by the name.
    """

    def __init__(self, items: dict[str, Any], is_left_out: Callable[[str], bool]) -> None:
        super().__init__(items, items.__getitem__, items.__setitem__, items.__delitem__)
        self._is_left_out = is_left_out

    def __iter__(self) -> Iterator[str]:
        return (name for name in [*self._names] if not self._is_left_out(name))


@dataclass(frozen=True)
class Known:
    """What functions of the user's know that a step may call, of a class or in an attribute, and those that these call.

    Attributes:
        variables: Global variables that they name, and those of modules and classes of the user's that they name,
            attributes of functions, and defaults that may be changed.
        around: Variables of functions around them.
        names: All names in them, also of attributes.
    """

    variables: list[tuple[str, Variables]]
    around: Variables
    names: frozenset[str]


_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
_BEGINS = ("training_step", "validation_step", "test_step", "predict_step", "forward")


def known_to(cls: type) -> Known:
    """What functions of a user's class know."""
    if cls not in _KNOWN:
        _KNOWN[cls] = _find_known(cls)
    return _KNOWN[cls]


def known_to_function(function: types.FunctionType, owner: Any) -> Known:
    """What a function knows that somebody has put into an attribute; nothing, if it is of a library.

    Args:
        function: The function.
        owner: The user's module, or another object.
    """
    if function not in _KNOWN:
        kind: Any = type(owner)
        finding = _Finding(kind)
        finding.functions(function)
        finding.go_on()
        _KNOWN[function] = finding.known()
    return _KNOWN[function]


def _find_known(cls: type) -> Known:
    finding = _Finding(cls)
    all_names = dict.fromkeys(name for base in cls.__mro__ for name in vars(base))
    names = _BEGINS if issubclass(cls, nn.Module) else all_names
    for name in names:
        finding.methods(name)
    finding.of_class(cls)
    finding.go_on()
    return finding.known()


class _Finding:
    """Goes through the user's functions that a step may call.

    Args:
        cls: The class whose methods they may call.

    Attributes:
        found: What holds variables, by its id: how that is told, a module's or function's dict or a class, and names.
        cells: Variables of functions around them.
        names: All names in functions.
    """

    def __init__(self, cls: type) -> None:
        self.found: dict[int, tuple[str, Any, dict[str, None]]] = {}
        self.cells: dict[str, Any] = {}
        self.names: set[str] = set()
        self._cls = cls
        self._packages = _packages_of(cls)
        self._waiting: list[Any] = []
        self._seen: set[types.FunctionType] = set()

    def methods(self, name: str) -> None:
        """The methods of that name are to be gone through."""
        found = [vars(base)[name] for base in self._cls.__mro__ if name in vars(base)]
        self._waiting.extend(map(_function_of, found))

    def functions(self, function: types.FunctionType) -> None:
        """A function is to be gone through, and what it decorates."""
        self._waiting += [function, _function_of(function)]

    def known(self) -> Known:
        """What has been found."""
        found = [(title, Variables(list(names), *_accessors(holder))) for title, holder, names in self.found.values()]
        get, put, drop = (partial(how, self.cells) for how in (_get_cell, _put_cell, _drop_cell))
        return Known(
            [(title, variables) for title, variables in found if variables],
            Variables(list(self.cells), get, put, drop),
            frozenset(self.names),
        )

    def go_on(self) -> None:
        """Go through all that is waiting, and what it calls."""
        while self._waiting:
            function = self._waiting.pop()
            if function is None or function in self._seen or function.__module__ is None:
                continue
            self._seen.add(function)
            if not is_of_library(function, self._packages):
                self._function(function)

    def _function(self, function: types.FunctionType) -> None:
        names = list(_names_in(function.__code__))
        for name in names:
            if name not in self.names:
                self.names.add(name)
                self.methods(name)
            self._variable(function.__globals__, name, names)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__" and (value := _content(cell)) is not cell and _may_change(value):
                is_other = self.cells.get(name, cell) is not cell
                self.cells[f"{name} of {function.__qualname__}" if is_other else name] = cell
            self._waiting.append(_function_of(_content(cell)))
        told = f"{function.__module__}.{function.__qualname__}"
        for name in vars(function):
            if name != "__wrapped__":
                self._note(f"the attributes of {told}", vars(function), name)
        defaults = {f"default {index}": value for index, value in enumerate(function.__defaults__ or ())}
        kept = {name: value for name, value in (defaults | (function.__kwdefaults__ or {})).items() if _holds(value)}
        for name in kept:
            self._note(f"the defaults of {told}", kept, name)

    def _variable(self, variables: dict[str, Any], name: str, names: Collection[str]) -> None:
        """A function names a variable of a module, and with it perhaps what that holds."""
        if name not in variables:
            return
        value = variables[name]
        self._waiting.append(_function_of(value))
        if _may_change(value):
            self._note(f"the variables of {variables['__name__']}", variables, name)
        elif isinstance(value, types.ModuleType) and vars(value) is not variables:
            if _package_of_name(value.__name__) in self._packages or not is_library(value.__name__):
                for attribute in names:
                    if attribute != name:
                        self._variable(vars(value), attribute, [each for each in names if each != name])
        elif isinstance(value, type) and not (issubclass(value, Enum) or is_of_library(value, self._packages)):
            self.of_class(value, names)

    def of_class(self, cls: type, names: Collection[str] = ()) -> None:
        """What a class of the user's holds for all of its objects, and those of its functions that are named."""
        for base in cls.__mro__:
            if is_of_library(base, self._packages):
                continue
            for name, value in vars(base).items():
                if name in names:
                    self._waiting.append(_function_of(value))
                if not (name.startswith("__") or hasattr(value, "__get__")) and _may_change(value):
                    self._note(f"the class {base.__module__}.{base.__qualname__}", base, name)

    def _note(self, told: str, holder: Any, name: str) -> None:
        self.found.setdefault(id(holder), (told, holder, {}))[2][name] = None


def _holds(value: Any) -> bool:
    """Whether a default of an argument may be changed in place."""
    return hasattr(value, "__dict__") or isinstance(value, (list, dict, set, deque))


def _accessors(holder: Any) -> tuple[Any, Any, Any]:
    if isinstance(holder, type):
        return partial(getattr, holder), partial(setattr, holder), partial(delattr, holder)
    return holder.__getitem__, holder.__setitem__, holder.__delitem__


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
    return not isinstance(value, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType))


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
