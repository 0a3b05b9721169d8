"""What a step changes of its module beside parameters and layers: `self.outs.append(loss)`, `self.count += 1`.

Every run of the step, on each stage and each microbatch, finds all places (see `places`) as they were at the begin of
the batch, and what it changes is taken back. What it changed on the last stage, where it is run to its end, is noted.
At the end of the batch the changes of all microbatches are put together as one batch would have made them, and made on
every rank:

- Numbers grow by what they have grown in the microbatches: floating-point numbers by the weighted mean, integers by the
  sum if they count something, and by what each has grown if they are indices or count batches; see `rules`. Where that
  is not known, integers that grow alike count batches, and samples if they grow by the number of these.
- Lists that each microbatch appends as many items to grow by so many, each merged like an output; by all, if these are
  one for each sample, or not as many.
- Tensors are merged like outputs; those that keep their shape, like numbers. What only some have written is theirs.
- Lists, tuples, tensors and arrays that are made anew with the earlier items first (`self.outs = self.outs + [loss]`,
  `torch.cat([self.outs, y])`) grow by what comes after these, merged in the same way.
- Of other values that differ, the last one stays, and of what is set of the Trainer, its optimizers and schedulers.
- Floating-point numbers grow by the sum where the module, or an object, counts samples and does not count batches.
- The numbers of an object that counts samples, such as an average meter, are not taken back on the last stage: they go
  on from microbatch to microbatch as from batch to batch. See `meters`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from operator import is_, is_not
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.model.reach.places import (
    ITEMS,
    LEFT_ALONE,
    LONGEST,
    NO_MODULES,
    Path,
    Places,
    named,
)
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import AbsentValueError, Tracked, plain_in_place
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.batches.structures import PLAIN
from lightning_pfo.strategy.step.effects.generators import Generators
from lightning_pfo.strategy.step.effects.merge import At, Changes, Merge, growth_of, queue_keeps
from lightning_pfo.strategy.step.effects.meters import Meters
from lightning_pfo.strategy.step.effects.outward.streams import Streams
from lightning_pfo.strategy.step.effects.parcel import Unsent
from lightning_pfo.strategy.step.effects.rows import Dimensions, Rows, dimensions_of_rows
from lightning_pfo.strategy.step.effects.tensors import LargeTensors, bytes_of, values_of

_ABSENT = object()
_MODULE = "named_modules()"
_DEAR_BYTES = 4 * 2**20
"""More than that a batch's change of an attribute is not sent to other ranks."""


class Attributes:
    """What a module holds at the begin of a batch.

    Args:
        owner: The user's module.
        modules: Other modules whose attributes count, by name.
        large: Which large tensors are written into; None: it is no batch that counts.
        meters: Which objects are known to count samples or not.

    Attributes:
        generators: Its random generators.
        streams: Its iterators and files.
        opaque: Its objects of libraries.
        modules: Modules beside those of the model.
        rows: Where the latest merged changes have a row for each sample.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Mapping[str, nn.Module] = NO_MODULES,
        large: LargeTensors | None = None,
        meters: MutableMapping[Path, bool] | None = None,
    ) -> None:
        self._owner = owner
        places = Places(owner, modules)
        self._containers = {path: (container, _copied(container)) for path, container in places.containers.items()}
        self._large = large
        before = (large or LargeTensors(copies_all=True, compares_all=True)).before
        self._tensors = {path: before(path, array) for path, array in places.tensors.items()}
        self._not_taken_back: dict[Path, torch.Tensor] = {}
        self._holders = places.holders
        self._paths = {id(holder): path for path, holder in places.holders.items()}
        self._settings = places.settings
        self._meters = Meters(places.objects, {} if meters is None else meters)
        self.generators = Generators(places.generators)
        self.streams = Streams(places.streams, places.containers)
        self.opaque = places.opaque
        self.modules = places.all_modules()
        self._left_alone: frozenset[Path] = frozenset()
        self.rows: dict[Path, Dimensions] = {}

    def changed_values(self) -> list[Any]:
        """What the step has set and appended, but the dear, and tensors into which it has written what is followed."""
        found = [
            value
            for container, before in self._containers.values()
            if not _is_as_before(container, before)
            for _, (_, value) in _changes_in(container, before)
        ]
        found += [
            noted.array
            for path, noted in self._tensors.items()
            if isinstance(noted.array, Tracked) and not self._are_of_ranks(path)
        ]
        return [value for value in found if bytes_of(value) <= _DEAR_BYTES]

    def _are_of_ranks(self, path: Path) -> bool:
        """Whether a tensor is one of several of which each rank has its own, as copies of weights that a hook made."""
        container, _ = self._containers.get(path[:-1], ((), None))
        return any(map(is_placeholder, container.values() if isinstance(container, MutableMapping) else container))

    def leave_alone(self, buffers: Iterable[str]) -> None:
        """Take no notice of some buffers of the module."""
        self._left_alone = frozenset(("_buffers", name) for name in buffers)
        self._tensors = {path: noted for path, noted in self._tensors.items() if path not in self._left_alone}

    def discard(self) -> None:
        """Give meters what they had at the begin of the batch."""
        self._meters.forget()
        self.take_back()

    def enter(self) -> None:
        """A run of the step begins; what others have changed since the last one, as hooks of backward do, stays."""
        for path, (container, before) in self._containers.items():
            is_at_begin = path not in ((), ("_buffers",)) and not self._meters.goes_on(path)
            if is_at_begin and not _is_as_before(container, before):
                self._containers[path] = (container, _copied(container))

    def take_back(self) -> Changes:
        """Take back what has changed since the run has begun, and return it as it is."""
        return self._take()

    def take_changes(self, size: int = 1) -> Changes:
        """Return what has changed in a run to the end of the step, and take it back.

        Args:
            size: How many samples its microbatch has.
        """
        changes = self._take(size)
        return _with_values({path: (kind, self._referring(value)) for path, (kind, value) in changes.items()})

    def _take(self, size: int | None = None) -> Changes:
        changes: Changes = {}
        others = [path for path, noted in self._containers.items() if not _is_as_before(*noted)]
        replaced = set(filter(self._is_replaced, others))
        for path in others:
            container, before = self._containers[path]
            found = dict(_changes_in(container, before))
            if self._left_alone and path == ("_buffers",):
                found = {key: value for key, value in found.items() if (*path, key) not in self._left_alone}
            if found:
                _take_back(container, before, list(found))
                if path in replaced:
                    continue
                if size is not None:
                    found = self._meters.take(path, found, before, size)
                changes.update({(*path, key): value for key, value in found.items()})
                self._meters.go_on(path, container)
        for path, tensor in self._tensors.items():
            if tensor.is_unchanged():
                continue
            if self._large is not None:
                self._large.note(path, tensor, is_told=size is not None)
            if tensor.before is not None:
                changes[path] = ("written", values_of(tensor.array))
                tensor.take_back()
            else:
                tensor.mark = tensor.mark_now()
                if size is not None:
                    self._not_taken_back[path] = tensor.array
        return changes

    def _is_replaced(self, path: Path) -> bool:
        """Whether something else is at a place now, so that nobody finds there what the step did with this before."""
        holder, (parent, _) = self._holders.get(path), self._containers.get(path[:-1], (None, None))
        if holder is None or not isinstance(parent, MutableMapping):
            return False
        now = parent.get(path[-1], holder)
        parts = now.values() if isinstance(now, dict) else now if isinstance(now, (list, tuple)) else ()
        return now is not holder and not any(part is holder for part in parts)

    def growth(self, changes: Changes) -> dict[str, Any]:
        """By how much what has changed has grown, by where it is; see `rules`."""
        found: dict[str, Any] = {}
        for path, (kind, value) in changes.items():
            place = named(path)
            if kind == "appended":  # a deque may not have room for all
                found[place] = value[-(getattr(self._containers[path[:-1]][0], "maxlen", None) or len(value)) :]
            elif kind != "gone":
                found |= growth_of(place, value, self.value_at(path))
        return found

    def merged(
        self,
        changes: Sequence[Changes],
        sizes: Sequence[int],
        weights: Sequence[float],
        rules: Rules | None = None,
    ) -> Changes:
        """What one batch would have changed, from what its microbatches have."""
        merge = Merge(sizes, weights, rules)
        merge.find_sums(changes, self.value_at)
        merged: Changes = {}
        for path in dict.fromkeys(path for each in changes for path in each):
            there = [index for index, each in enumerate(changes) if path in each]
            found = [changes[index][path] for index in there]
            kinds, values = {kind for kind, _ in found}, [value for _, value in found]
            if kinds == {"appended"}:
                merged[path] = ("appended", merge.appended(values, named(path)))
            elif path[:-1] in self._settings:
                merged[path] = found[-1]
                if len(found) < len(changes) or not _is_same(values):
                    warn_once(
                        f"A step sets {named(path)} by what it has, which the microbatches of a batch do not agree on. "
                        f"The last of them that sets it counts. Decide after the step, by what it returns (in "
                        f"on_train_batch_end(outputs, ...)): that is of the whole batch."
                    )
            elif len(kinds) > 1 or kinds == {"gone"}:
                merged[path] = found[-1]
            else:
                before = self.value_at(path)
                if len(there) < len(changes) and before is not None and merge.compares(named(path), values[0]):
                    values = [each[path][1] if path in each else before for each in changes]
                if len(changes) > 1 and _is_too_long(path, before, values[0], sizes[there[0]]):
                    warn_once(
                        f"A step appends to {named(path)} and takes the first items out. Each microbatch finds there "
                        f"what the batch has found: it may have got longer than on one device, and each takes out the "
                        f"same. A collections.deque(maxlen=...) is as long as on one device; all is that of one device "
                        f"with num_microbatches=1 and schedule='gpipe'."
                    )
                of_these = merge if len(values) == len(changes) else merge.only(there)
                together = of_these.values(values, before, named(path), path[:-1])
                merged[path] = (found[0][0], together)
                if kinds == {"set"} and len(found) == len(changes) > 1:
                    self._note_rows(path, values, together, sizes)
        as_they_are: Changes = {path: ("written", array.detach()) for path, array in self._not_taken_back.items()}
        return _with_values(merged | self._meters.changes() | as_they_are)

    def _note_rows(self, path: Path, values: Sequence[Any], together: Any, sizes: Sequence[int]) -> None:
        if where := dimensions_of_rows(values, together, sizes):
            self.rows[path] = where

    def rows_at(self, where: Mapping[Path, Dimensions]) -> list[Rows]:
        """What is at places with rows now."""
        found = []
        for path, dimensions in where.items():
            holder, _ = self._containers.get(path[:-1], (None, None))
            if isinstance(holder, MutableMapping) and path[-1] in holder:
                found.append(Rows(holder, path[-1], holder[path[-1]], dimensions))
        return found

    def _referring(self, value: Any) -> Any:
        """A value in which what was there at the begin of the batch stands as its place, as other ranks have it too."""

        def place(part: Any) -> Any:
            if not isinstance(part, MethodType):
                return At(self._paths[id(part)]) if id(part) in self._paths else part
            path = self._paths.get(id(part.__self__)) or self._path_of_module(part.__self__)
            return part if path is None else At(path, part.__name__)

        return _replaced(value, place)

    def _referred(self, value: Any) -> Any:
        def found(part: Any) -> Any:
            if not isinstance(part, At):
                return part
            is_module = part.path[:1] == (_MODULE,)
            holder = self._owner.get_submodule(part.path[1]) if is_module else self._holders.get(part.path)
            return getattr(holder, part.method, None) if part.method else holder

        return _replaced(value, found)

    def _path_of_module(self, holder: Any) -> Path | None:
        names = (name for name, module in self._owner.named_modules() if module is holder)
        name = next(names, None)
        return None if name is None else (_MODULE, name)

    def dear(self, changes: Changes) -> Changes:
        """Those that are too large to be sent, with a warning for each attribute, and classes that a step makes."""
        is_set = {path: change for path, change in changes.items() if change[0] != "written"}
        found = {path: change for path, change in is_set.items() if bytes_of(change) > _DEAR_BYTES}
        for path, value in found.items():
            warn_once(
                f"A step has left {bytes_of(value) / 2**20:.0f} MiB in {named(path)}, which only the rank of the last"
                f" stage has: more than {_DEAR_BYTES / 2**20:.0f} MiB a batch are not sent to the others. Keep less "
                f"(such as a metric object), or return it from the step."
            )
        return found | {path: change for path, change in is_set.items() if _is_made_by_code(change[1])}

    def apply(self, changes: Mapping[Path, Any]) -> None:
        """Make changes to the module as it was at the begin of the batch."""
        for path, (kind, sent) in changes.items():
            value = self._referred(sent)
            if kind == "written":
                if path in self._tensors:
                    self._tensors[path].write(value)
                continue
            container, _ = self._containers.get(path[:-1], (None, None))
            if container is None:  # this rank has had something else there
                continue
            if kind == "gone":
                container.pop(path[-1], None)
            elif kind == "appended":
                container.extend(value)
            elif isinstance(container, MutableMapping):
                if value is not Unsent.HERE:
                    container[path[-1]] = value
                elif container is not self._holders.get(path[:-1]):  # attributes; who caches looks for an item again
                    container[path[-1]] = None
            else:
                _refill(container, value)

    def value_at(self, path: Path) -> Any:
        """What was somewhere at the begin of the batch; None also where there was no such place."""
        if path in self._tensors:
            tensor = self._tensors[path]
            return tensor.array if tensor.before is None else tensor.before
        _, holder = self._containers.get(path[:-1], (None, None))
        before: Any = holder.get(path[-1]) if isinstance(holder, dict) else holder
        if type(before) in (list, tuple):
            kind: Any = type(before)
            return kind(self._referring(item) for item in before)
        return before


def _replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """A value with others in place of the parts for which `by` does not return these themselves."""
    if type(value) in PLAIN:
        return value
    other = by(value)
    if other is not value:
        return other
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, by) for item in value)
    return {key: _replaced(item, by) for key, item in value.items()} if type(value) is dict else value


def _is_same(values: Sequence[Any]) -> bool:
    """Whether microbatches have set the same, as far as it can be compared."""
    try:
        return all(bool(value == values[0]) for value in values)
    except (RuntimeError, ValueError):  # tensors and arrays of several numbers
        return True


def _is_too_long(path: Path, before: Any, value: Any, size: int) -> bool:
    """Whether a queue may have got longer in the batch before than it gets."""
    if type(before) is not type(value) or not hasattr(before, "__len__") or not getattr(before, "ndim", 1):
        return False
    return (path[-1] == ITEMS or len(value) < len(before)) and queue_keeps(value, size, before) > 0


def _copied(container: Any) -> Any:
    if isinstance(container, MutableMapping):
        return dict(container)
    return len(container) if len(container) > LONGEST else container.copy()


def _is_as_before(container: Any, before: Any) -> bool:
    """Whether nothing has changed; nearly always, and told many times as fast as what has."""
    if isinstance(before, dict):
        return container.keys() == before.keys() and all(map(is_, container.values(), before.values()))
    if isinstance(before, int):  # of a long list
        return len(container) <= before
    if isinstance(before, set):
        return bool(container == before)
    return len(container) == len(before) and all(map(is_, container, before))


def _changes_in(container: Any, before: Any) -> Iterator[tuple[Any, Any]]:
    """What has changed of a container that is not as before."""
    if isinstance(before, dict):
        is_module = "_modules" in container
        for key, value in container.items():
            if before.get(key, _ABSENT) is not value and not (is_module and key in LEFT_ALONE):
                yield key, ("set", value)
        for key in before:
            if key not in container and not (is_module and key in LEFT_ALONE):
                yield key, ("gone", None)
    elif isinstance(before, set):
        yield ITEMS, ("set", set(container))
    elif isinstance(before, int):
        yield ITEMS, ("appended", container[before:])
    else:
        items = list(container)
        added = _appended(items, list(before), getattr(container, "maxlen", None))
        yield ITEMS, ("set", items) if added is None else ("appended", added)


def _appended(items: list[Any], before: list[Any], most: int | None) -> list[Any] | None:
    """What was appended to a list or a deque, of which the first ones are gone if it has no place for more."""
    if most is None or len(items) < most:
        is_longer = len(items) > len(before) and not any(map(is_not, items, before))
        return items[len(before) :] if is_longer else None
    for kept in range(min(most - 1, len(before)), 0, -1):
        if not any(map(is_not, items, before[-kept:])):
            return items[kept:]
    return items


def _take_back(container: Any, before: Any, keys: Sequence[Any]) -> None:
    if isinstance(before, int):
        del container[before:]
        return
    if not isinstance(before, dict):
        _refill(container, before)
        return
    for key in keys:
        if key in before:
            container[key] = before[key]
        else:
            del container[key]


def _refill(container: Any, items: Any) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


def _is_made_by_code(value: Any) -> bool:
    """Whether it is a class or function that a function has made; where it is missed, the same code makes it."""
    if not isinstance(value, (type, FunctionType)):
        return False
    try:
        pickle.dumps(value)  # by its name in a module
    except Exception:
        return True
    return False


def _with_values(changes: Changes) -> Changes:
    """Changes with ordinary tensors, which hold no graph."""
    found: Changes = {}
    for path, (kind, value) in changes.items():
        try:
            found[path] = (kind, tree_map_only(torch.Tensor, torch.Tensor.detach, plain_in_place(value)))
        except AbsentValueError:  # too dear to be sent from stage to stage
            warn_once(f"A step has left a large value of an earlier stage in {named(path)}, which no rank has.")
    return found
