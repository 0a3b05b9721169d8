"""Where a step may leave something behind: attributes, and the containers, tensors and objects that are in them.

They are reached from the user's module: from it, its class, and modules around its layers; from its Trainer, as far as
a step, or code that it reaches through attributes, names what that has; from the variables that a step knows besides
its arguments; and from hooks on layers. Into objects of the user's own classes it is looked as into containers; those
of libraries are theirs.
"""

from __future__ import annotations

import csv
import io
import random
import types
from collections import deque
from collections.abc import Collection, Mapping
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from lightning_pfo.strategy.compat.modules import forward_hooks_of, forward_pre_hooks_of, modules_of
from lightning_pfo.strategy.model.reach.metric_objects import is_metric, kept_by_metric
from lightning_pfo.strategy.model.reach.metrics import metrics_set_of
from lightning_pfo.strategy.model.reach.of_trainer import others_of, settings_held, settings_of
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.variables import (
    AllBut,
    Known,
    Variables,
    changes_by_itself,
    is_object_of_user,
    is_of_library,
    known_to,
    known_to_function,
    packages_of,
)

_CALLED = frozenset((types.FunctionType, types.MethodType, types.BuiltinMethodType, partial))
"""Types of what a step may call that holds something."""
PLAIN = frozenset((str, bytes, int, float, complex, bool, type(None), types.FunctionType, types.MethodType))
"""Types of most attributes; there are no attributes or items in them."""
Path = tuple[Any, ...]
"""How a place is reached: names of attributes, keys and indices; before those another root than the module."""

LONGEST = 10_000
"""Containers of more items are data: nobody looks into them, and of lists only what is appended."""
_MANY = 250
"""Nobody looks into the items of containers that have more."""
_MOST = 2_000
"""Of more containers and objects, the later ones are taken for data."""
_FEW_BYTES = 2**16
"""Tensors of more in a dataset of a library are its data."""
LEFT_ALONE = frozenset(vars(nn.Module())) - {"_buffers"}
"""What belongs to every module."""


NO_MODULES: Mapping[str, nn.Module] = types.MappingProxyType({})


class Places:
    """The places that a module has now.

    Args:
        owner: The user's module, or another object.
        modules: Other modules whose attributes count, by name.
        classes: Other classes of which what they hold and know counts.

    Attributes:
        containers: Dicts (of attributes too), lists, deques and sets.
        tensors: Tensors and arrays that may be written into.
        settings: Which of the containers are attributes of the Trainer, or set its optimizers and schedulers.
        objects: Which of the containers are the attributes of an object, and no module.
        generators: Random generators.
        streams: Iterators, files, and writers of libraries; each at all of its places.
        opaque: Objects of libraries that nobody can look into, and files.
        holders: The containers, and the objects that these are the attributes of.
        modules: Modules in any of these, such as metrics in a dict; those of the model may be among them.
    """

    def __init__(
        self, owner: Any, modules: Mapping[str, nn.Module] = NO_MODULES, classes: Collection[type] = ()
    ) -> None:
        self.containers: dict[Path, Any] = {}
        self.tensors: dict[Path, Any] = {}
        self.objects: set[Path] = set()
        self.generators: dict[Path, Any] = {}
        self.streams: dict[Path, Any] = {}
        self.opaque: dict[Path, Any] = {}
        self.holders: dict[Path, Any] = {}
        self.modules: dict[Path, nn.Module] = {}
        self._seen: set[int] = set()
        self._classes: list[type] = []
        self._optimizing: dict[str, Any] = {}
        self._names: set[int] = set()
        self._named: set[str] = set()
        self._asked_with = (-1, -1)
        self._owner = owner
        self._given = {id(module) for module in modules.values()}
        self._packages = packages_of(owner)
        self._module((), owner, LEFT_ALONE)
        kind: Any = type(owner)
        for name in _names_of_containers(kind):
            if name not in vars(owner):
                self._note((name,), getattr(kind, name))
        for name, module in modules.items():
            self._module((f"self.{name}",), module, LEFT_ALONE | {"_buffers"})
        of_owner = dict.fromkeys(map(type, (owner, *modules.values())))
        for cls in of_owner:
            self._name(known_to(cls))
        self.settings: dict[Path, Any] = {}
        self._of_trainer()
        self._hooks(owner)
        for cls in dict.fromkeys((*of_owner, *classes)):
            self._known_to(cls)
        num_classes = num_names = -1
        while (num_classes, num_names) != (len(self._classes), len(self._names)):  # each may lead to more of the others
            first, num_classes, num_names = max(num_classes, 0), len(self._classes), len(self._names)
            for cls in self._classes[first:num_classes]:
                self._known_to(cls)
            self._of_trainer()

    def _of_trainer(self) -> None:
        """Note what the Trainer has that is named in code found so far, unless no more was found than last time."""
        found = (len(self._names), len(self._optimizing))
        if found == self._asked_with:
            return
        self._asked_with = found
        for name, other in others_of(self._owner, self._is_named):
            self._object((name,), other)
            if isinstance(other, (Dataset, Sampler)):
                self._dataset((name,), other)
        for name, metrics in metrics_set_of(self._owner, self._is_named):
            self._note((name,), metrics)
        there = {id(holder) for holder in self.settings.values() if isinstance(holder, dict)}
        held = settings_held(self._owner, self._optimizing)
        for name, holder in (*settings_of(self._owner, self._is_named), *held):
            path = (name,)
            if path in self.settings or id(holder) in there:
                continue
            there.add(id(holder))
            self.settings[path] = self.containers[path] = holder
            for key, value in holder.items():
                if isinstance(value, torch.Tensor):
                    self._note((*path, key), value)

    def _is_named(self, name: str) -> bool:  # there are hundreds, and places are found for each batch
        return name in self._named

    def _name(self, known: Known) -> None:
        self._names.add(id(known))
        self._named |= known.names

    def all_modules(self) -> list[nn.Module]:
        """`modules`, and those within them."""
        return [within for module in self.modules.values() for within in module.modules()]

    def _known_to(self, cls: type) -> None:
        known = known_to(cls)
        self._variables(known)
        if known.around:
            self._attributes((f"the variables around {cls.__module__}.{cls.__qualname__}",), known.around)

    def _variables(self, known: Known) -> None:
        self._name(known)
        for name, variables in known.variables:
            there = self.containers.get((name,))  # functions of several classes name variables of one file
            self._attributes((name,), variables if there is None else there.joined(variables))

    def _module(self, path: Path, module: Any, left_alone: Collection[str]) -> None:
        kept = kept_by_metric(module)
        self.containers[path] = AllBut(vars(module), kept.__contains__) if kept else vars(module)
        for name, value in _in_order(vars(module)):
            if name not in left_alone and name not in kept:
                self._note((*path, name), value)

    def _object(self, path: Path, value: Any) -> None:
        if id(value) not in self._seen and is_object_of_user(value, self._packages):
            self._put(path, value)

    def _dataset(self, path: Path, dataset: Any) -> None:
        """Note what a step keeps in a dataset or sampler of a library, not its data, and the user's own within it."""
        if id(dataset) in self._seen:
            return
        self._seen.add(id(dataset))
        data = frozenset(name for name, value in vars(dataset).items() if _is_much(value))
        self._attributes(path, AllBut(vars(dataset), data.__contains__))
        for name, value in _in_order(vars(dataset)):
            parts = list(enumerate(value)) if isinstance(value, (list, tuple)) and len(value) <= _MANY else []
            for where, part in [((name,), value), *(((name, index), part) for index, part in parts)]:
                if isinstance(part, Dataset):
                    self._object((*path, *where), part)
                    self._dataset((*path, *where), part)

    def _put(self, path: Path, value: Any) -> None:
        self._seen.add(id(value))
        self._attributes(path, _attributes_of(value))
        self.holders[path] = value
        if type(value) not in self._classes:
            self._classes.append(type(value))

    def _attributes(self, path: Path, attributes: Any) -> None:
        if len(self.containers) < _MOST:
            self.containers[path] = attributes
            self.objects.add(path)
            for name, value in _in_order(attributes):
                self._note((*path, name), value)

    def _hooks(self, owner: Any) -> None:
        """Note what is known to the user's hooks on layers, such as what a callback keeps of them by name.

        So are attributes of layers that they do not know of themselves, where hooks follow their forward; hooks before
        it make weights (`layer.weight = layer.weight_orig * scale`).
        """
        for number, module in enumerate(modules_of(owner) if isinstance(owner, nn.Module) else ()):
            before, after = forward_pre_hooks_of(module).values(), forward_hooks_of(module)
            if not before and not after:
                continue
            for index, hook in enumerate((*before, *after)):
                if not self._is_of_library(hook):
                    self._note((_HOOKS, number, index), hook)
            if module is not owner and not all(map(self._is_of_library, after)):
                kind: Any = type(module)
                self._attributes((_HOOKED, number), AllBut(vars(module), partial(_is_known_to, kind)))

    def _is_of_library(self, hook: Any) -> bool:
        called = hook.func if isinstance(hook, partial) else hook
        return not hasattr(called, "__module__") or is_of_library(called, self._packages)

    def _called(self, path: Path, value: Any) -> None:
        """Note what is known to a function, method or partial call that somebody has put into an attribute."""
        self._seen.add(id(value))
        if isinstance(value, partial):
            parts: dict[str, Any] = {_CALLS: value.func, _GIVEN: value.args, _NAMED: value.keywords}
        elif isinstance(value, types.FunctionType):
            parts = {}
            known = known_to_function(value, self._owner)
            self._variables(known)
            if known.around:
                self._attributes((*path, _AROUND), known.around)
        else:
            parts = {_CALLS: value.__self__}
        for name, part in parts.items():
            if _is_stream(part):  # nothing can stand in for it
                self.opaque[(*path, name)] = part
            else:
                self._note((*path, name), part)

    def _note(self, path: Path, value: Any) -> None:
        if type(value) in _CALLED and id(value) not in self._seen:
            self._called(path, value)
        if type(value) in PLAIN or isinstance(value, (nn.Parameter, type)) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._seen.add(id(value))
            self.modules[path] = value
            if id(value) not in self._given and is_metric(value) and not is_of_library(type(value), self._packages):
                self._module(path, value, LEFT_ALONE)
        elif isinstance(value, torch.Tensor):
            self._seen.add(id(value))
            if not is_placeholder(value) and value.layout == torch.strided and value.is_leaf:
                self.tensors[path] = value
        elif isinstance(value, np.ndarray):
            self._seen.add(id(value))
            self.tensors[path] = value
        elif isinstance(value, (dict, list, deque, set)):
            self._seen.add(id(value))
            if len(self.containers) < _MOST and (len(value) <= LONGEST or isinstance(value, list)):
                self.containers[path] = self.holders[path] = value
            if len(value) <= _MANY and not isinstance(value, set):
                for key, item in _in_order(value) if isinstance(value, dict) else list(enumerate(value)):
                    self._note((*path, key), item)
            if getattr(value, "__dict__", None):  # of a dict of another class
                self._note((*path, _BESIDE), vars(value))
        elif isinstance(value, GENERATORS):
            self._seen.add(id(value))
            self.generators[path] = value
        elif isinstance(value, tuple):
            for index, item in enumerate(value[:_MANY]):
                self._note((*path, index), item)
        elif isinstance(value, (LRScheduler, Optimizer)):
            self._seen.add(id(value))
            self._optimizing[named(path)] = value
            if is_object_of_user(value, self._packages):
                self._classes.append(type(value))
                for name, item in _in_order(vars(value)):
                    self._note((*path, name), item)
        elif is_object_of_user(value, self._packages):
            self._put(path, value)
        elif _is_stream(value):
            self.streams[path] = value
            if isinstance(value, io.IOBase):
                self.opaque[path] = value
        elif is_simple(value):
            self._put(path, value)
        elif not changes_by_itself(type(value)):
            self._seen.add(id(value))
            self.opaque[path] = self._optimizing[named(path)] = value  # it may set the optimizer that it has


def _in_order(items: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a dict by name, as each process may set what has several names in another order."""
    found = list(items.items())
    return sorted(found, key=itemgetter(0)) if all(type(name) is str for name, _ in found) else found


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""Those of which the state is known."""
_HOOKS, _HOOKED = "hooks on layers", "layers with hooks"
_BESIDE = "its attributes"
_AROUND, _CALLS, _GIVEN, _NAMED = "its variables", "what it calls", "its arguments", "its keywords"
ITEMS = "all items"
"""Stands at the end of a path for what a list, deque or set has."""
_UNNAMED = (ITEMS, _BESIDE, "_buffers", _AROUND, _CALLS, _GIVEN, _NAMED)


def named(path: Path) -> str:
    """How a place is told to users."""
    root, *keys = [key for key in path if key not in _UNNAMED]
    text = str(root) if isinstance(root, str) and not root.isidentifier() else f"self.{root}"
    return text + "".join(f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in keys)


# ---- iterators and files ----

_ROWS = type(csv.writer(io.StringIO()))
_WRITERS = ("SummaryWriter",)
"""Names of classes that only take what they are told."""


def _is_stream(value: Any) -> bool:
    kind: Any = type(value)
    is_file = isinstance(value, io.IOBase)
    return (is_file and not value.closed) or (not is_file and hasattr(kind, "__next__")) or _is_writer(kind)


def takes_only(stream: Any) -> bool:
    """Whether a stream is written into; else it is an iterator, or a file that is read."""
    return bool(stream.writable()) if isinstance(stream, io.IOBase) else _is_writer(type(stream))


def _is_writer(kind: type) -> bool:
    return issubclass(kind, (_ROWS, csv.DictWriter)) or kind.__name__ in _WRITERS


# ---- random generators ----


def state_of(generator: Any) -> Any:
    """The state of one of `GENERATORS`."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if hasattr(generator, "getstate") else generator.get_state()


def set_state(generator: Any, state: Any) -> None:
    """Put back what `state_of` returned."""
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.set_state(state)


# ---- attributes of objects ----


def _attributes_of(value: Any) -> Any:
    if hasattr(value, "__dict__"):
        return vars(value)
    of_classes = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    slots = [name for names in of_classes for name in ((names,) if isinstance(names, str) else names)]
    put, drop = partial(object.__setattr__, value), partial(object.__delattr__, value)
    return Variables(slots, partial(getattr, value), put, drop)


def is_simple(value: Any, depth: int = 4) -> bool:
    """Whether it is an object that holds nothing but data, such as an average meter of a library."""
    attributes = getattr(value, "__dict__", {})
    if not attributes or callable(value) or changes_by_itself(type(value)):
        return False
    return all(_is_data(item, depth) for item in attributes.values())


def _is_data(value: Any, depth: int) -> bool:
    kind = type(value)
    if kind in PLAIN or kind in (torch.Tensor, np.ndarray):
        return True
    if not depth or isinstance(value, type):
        return False
    if isinstance(value, (dict, list, tuple, set, deque)):
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= _MANY and all(_is_data(item, depth - 1) for item in items)
    return is_simple(value, depth - 1)


def _is_much(value: Any, depth: int = 4) -> bool:
    """Whether an attribute of a dataset is data, which nobody copies for each batch."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.nbytes > _FEW_BYTES
    if not depth or not isinstance(value, (list, tuple, dict, set, deque)):
        return not depth or isinstance(value, Dataset)
    items = value.values() if isinstance(value, dict) else value
    return any(_is_much(item, depth - 1) for item in islice(items, _MANY))


@cache
def _is_known_to(cls: type, name: str) -> bool:
    """Whether an attribute of a layer is one that its own class knows, so that it is looked at as its layer's."""
    return name in LEFT_ALONE or hasattr(cls, name) or name in known_to(cls).names


@cache
def _names_of_containers(cls: type) -> list[str]:
    """The containers that a user's class holds for all of its modules."""
    of_users = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "lightning.", "builtins"))]
    names = dict.fromkeys(name for base in of_users for name in vars(base) if not name.startswith("__"))
    return [name for name in names if isinstance(getattr(cls, name), (dict, list, deque, set))]
