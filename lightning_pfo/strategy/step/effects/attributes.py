"""What a step changes of its module beside parameters and layers: `self.outs.append(loss)`, `self.count += 1`.

Every run of the step, on each stage and each microbatch, finds the module as it was at the begin of the batch, and what
it changes is taken back. What it changed on the last stage, where it is run to its end, is noted. At the end of the
batch the changes of all microbatches are put together as one batch would have made them, and made on every rank:

- Numbers grow by what they have grown in the microbatches: floating-point numbers by the weighted mean, tensors of
  integers by the sum. Python's integers that grow alike count batches, and samples if they grow by the number of these.
- Lists that each microbatch appends as many items to grow by so many, each merged like an output; by all, if these are
  one for each sample, or not as many.
- Tensors are merged like outputs; those that keep their shape, like numbers.
- Lists, tuples, tensors and arrays that are made anew with the earlier items first (`self.outs = self.outs + [loss]`,
  `torch.cat([self.outs, y])`) grow by what comes after these, merged in the same way.
- Of other values that differ, the last one stays.
- Floating-point numbers grow by the sum where the module counts samples and does not count batches.
- Simple objects, such as average meters, are not taken back on the last stage: microbatches are their batches.

Attributes, containers in them and in the user's class, tensors and simple objects of the module itself count, not
those of its layers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_, is_not
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import AbsentValueError, plain
from lightning_pfo.strategy.parallel.compat import tree_leaves, tree_map_only, version_of
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.structures import PLAIN
from lightning_pfo.strategy.step.effects.merge import Changes, Merge, Path

_ABSENT = object()
_LONGEST = 10_000
"""Containers of more items are data: nobody looks into them, and of lists only what is appended."""
_SMALL_BYTES = 2**16
"""Larger tensors are not copied: what is written into them stays, on the rank where it was written."""
_DEAR_BYTES = 4 * 2**20
"""More than that a batch's change of an attribute is not sent to other ranks."""
_LEFT_ALONE = frozenset(vars(nn.Module())) - {"_buffers"}


class Attributes:
    """What a module holds at the begin of a batch.

    Args:
        owner: The user's module.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._containers: dict[Path, tuple[Any, Any]] = {}
        self._tensors: dict[Path, tuple[Any, int, Any]] = {}
        self._objects: dict[Path, tuple[Any, dict[str, Any]]] = {}
        self._entered: dict[Path, dict[str, Any]] = {}
        self._seen: set[int] = set()
        self._left_alone: frozenset[Path] = frozenset()
        attributes = {name: value for name, value in vars(owner).items() if name not in _LEFT_ALONE}
        self._containers[()] = (vars(owner), dict(vars(owner)))
        for name, value in attributes.items():
            self._note((name,), value)
        cls: Any = type(owner)
        for name in _names_of_containers(cls):
            if name not in attributes:
                self._note((name,), getattr(cls, name))
        self.enter()

    def _note(self, path: Path, value: Any) -> None:
        if type(value) in PLAIN or isinstance(value, (nn.Module, nn.Parameter)) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not is_placeholder(value) and value.layout == torch.strided and value.is_leaf:
                small = value.numel() * value.element_size() <= _SMALL_BYTES
                self._tensors[path] = (value, version_of(value), value.detach().clone() if small else None)
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _SMALL_BYTES:
                self._tensors[path] = (value, 0, value.copy())
        elif isinstance(value, (dict, list, deque, set)):
            is_long = len(value) > _LONGEST
            if not is_long or isinstance(value, list):
                self._containers[path] = (value, len(value) if is_long else value.copy())
            if not is_long:
                for key, item in _items_of(value):
                    self._note((*path, key), item)
        elif _is_simple(value):
            self._objects[path] = (vars(value), dict(vars(value)))

    def changed_values(self) -> list[Any]:
        """What the step has set and appended, but the dear."""
        found = [
            value for container, before in self._containers.values() for _, (_, value) in _changes_in(container, before)
        ]
        return [value for value in found if _bytes_of(value) <= _DEAR_BYTES]

    def leave_alone(self, buffers: Iterable[str]) -> None:
        """Take no notice of some buffers of the module."""
        self._left_alone = frozenset(("_buffers", name) for name in buffers)
        self._tensors = {path: noted for path, noted in self._tensors.items() if path not in self._left_alone}

    def enter(self) -> None:
        """A run of the step begins."""
        self._entered = {path: dict(attributes) for path, (attributes, _) in self._objects.items()}

    def take_back(self) -> None:
        """Take back what has changed since the run has begun."""
        self.take_changes(values=False)
        for path, entered in self._entered.items():
            attributes, _ = self._objects[path]
            attributes.clear()
            attributes.update(entered)

    def take_back_objects(self) -> None:
        """Give simple objects what they had at the begin of the batch."""
        for attributes, before in self._objects.values():
            attributes.clear()
            attributes.update(before)

    def take_changes(self, *, values: bool = True) -> Changes:
        """Return what has changed, and take it back.

        Args:
            values: Whether somebody wants the new values; a stage may not have them.
        """
        changes: Changes = {}
        for path, (container, before) in self._containers.items():
            found = {(*path, key): value for key, value in _changes_in(container, before)}
            found = {key: value for key, value in found.items() if key not in self._left_alone}
            if found:
                _take_back(container, before, list(found))
                changes.update(found)
        for path, (array, version, before) in self._tensors.items():
            if before is not None and not _is_unchanged(array, version, before):
                changes[path] = ("written", array.copy() if isinstance(array, np.ndarray) else array.detach().clone())
                with torch.no_grad():
                    array[...] = before
                self._tensors[path] = (array, _version_of(array), before)
        return _with_values(changes) if values else {}

    def merged(self, changes: Sequence[Changes], sizes: Sequence[int], weights: Sequence[float]) -> Changes:
        """What one batch would have changed, from what its microbatches have."""
        merge = Merge(sizes, weights)
        growths = [merge.growth(path, changes, self._value_at(path)) for path in changes[0]] if changes else []
        if merge.sizes in growths and (1,) * len(sizes) not in growths and max(sizes) > 1:
            merge.floats_add_up = True
        merged: Changes = {}
        for path in dict.fromkeys(path for each in changes for path in each):
            found = [each[path] for each in changes if path in each]
            kinds, values = {kind for kind, _ in found}, [value for _, value in found]
            if kinds == {"appended"}:
                merged[path] = ("appended", merge.appended(values))
            elif len(found) < len(sizes) or kinds & {"gone", "appended"}:
                merged[path] = found[-1]
            else:
                merged[path] = (found[0][0], merge.values(values, self._value_at(path)))
        for path, (attributes, before) in self._objects.items():
            merged |= {(*path, key): value for key, value in _changes_in(attributes, before)}
        return _with_values(merged)

    def dear(self, changes: Changes) -> Changes:
        """Those that are too large to be sent, with a warning for each attribute."""
        found = {path: change for path, change in changes.items() if _bytes_of(change) > _DEAR_BYTES}
        for path, value in found.items():
            warn_once(
                f"A step has left {_bytes_of(value) / 2**20:.0f} MiB in self.{path[0]}, which only the rank of the last"
                f" stage has: more than {_DEAR_BYTES / 2**20:.0f} MiB a batch are not sent to the others. Keep less "
                f"(such as a metric object), or return it from the step."
            )
        return found

    def apply(self, changes: Mapping[Path, Any]) -> None:
        """Make changes to the module as it was at the begin of the batch."""
        for path, (kind, value) in changes.items():
            if kind == "written":
                if path in self._tensors:
                    with torch.no_grad():
                        self._tensors[path][0][...] = value
                continue
            container, _ = self._containers.get(path[:-1]) or self._objects.get(path[:-1]) or (None, None)
            if container is None:  # this rank has had something else there
                continue
            if kind == "gone":
                container.pop(path[-1], None)
            elif kind == "appended":
                container.extend(value)
            elif isinstance(container, dict):
                container[path[-1]] = value
            else:
                _refill(container, value)

    def _value_at(self, path: Path) -> Any:
        if path in self._tensors:
            tensor, _, copy = self._tensors[path]
            return tensor if copy is None else copy
        before = self._containers[path[:-1]][1]
        return before.get(path[-1]) if isinstance(before, dict) else None


_ITEMS = "all items"


@cache
def _names_of_containers(cls: type) -> list[str]:
    """The containers that a user's class holds for all of its modules."""
    of_users = [base for base in cls.__mro__ if not base.__module__.startswith(("torch.", "lightning.", "builtins"))]
    names = dict.fromkeys(name for base in of_users for name in vars(base) if not name.startswith("__"))
    return [name for name in names if isinstance(getattr(cls, name), (dict, list, deque, set))]


def _items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _changes_in(container: Any, before: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(before, dict):
        if container.keys() == before.keys() and all(map(is_, container.values(), before.values())):
            return  # nearly always, and many times as fast
        is_module = "_modules" in container
        for key, value in container.items():
            if before.get(key, _ABSENT) is not value and not (is_module and key in _LEFT_ALONE):
                yield key, ("set", value)
        for key in before:
            if key not in container and not (is_module and key in _LEFT_ALONE):
                yield key, ("gone", None)
    elif isinstance(before, set):
        if container != before:
            yield _ITEMS, ("set", set(container))
    elif isinstance(before, int):  # of a long list
        if len(container) > before:
            yield _ITEMS, ("appended", container[before:])
    elif len(container) != len(before) or any(map(is_not, container, before)):
        is_longer = len(container) > len(before) and not any(map(is_not, container, before))
        items = list(container)
        yield _ITEMS, ("appended", items[len(before) :]) if is_longer else ("set", items)


def _take_back(container: Any, before: Any, paths: Sequence[Path]) -> None:
    if isinstance(before, int):
        del container[before:]
        return
    if not isinstance(before, dict):
        _refill(container, before)
        return
    for *_, key in paths:
        if key in before:
            container[key] = before[key]
        else:
            del container[key]


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


def _version_of(array: Any) -> int:
    return version_of(array) if isinstance(array, torch.Tensor) else 0


def _is_unchanged(array: Any, version: int, before: Any) -> bool:
    return np.array_equal(array, before) if isinstance(array, np.ndarray) else version_of(array) == version


def _is_simple(value: Any) -> bool:
    """Whether it is an object that holds nothing but plain values and tensors, such as an average meter."""
    attributes = getattr(value, "__dict__", {})
    return (
        bool(attributes)
        and not isinstance(value, type)
        and not callable(value)
        and all(type(item) in PLAIN or type(item) is torch.Tensor for item in attributes.values())
    )


def _with_values(changes: Changes) -> Changes:
    """Changes with ordinary tensors, which hold no graph."""
    found: Changes = {}
    for path, (kind, value) in changes.items():
        try:
            found[path] = (kind, tree_map_only(torch.Tensor, torch.Tensor.detach, plain(value)))
        except AbsentValueError:  # too dear to be sent from stage to stage
            warn_once(f"A step has left a large value of an earlier stage in self.{path[0]}, which no rank has.")
    return found


def _bytes_of(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
