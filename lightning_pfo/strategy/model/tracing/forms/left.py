"""What a call leaves beside what it returns: what it writes into its arguments, and tensors that its parts keep.

Or what it takes from what others have left: of a list that layers use as a stack, the later ones find there the rest.

A layer that keeps an auxiliary loss (`self.aux = ...`, `self.losses.append(...)`, a list that all layers know), for the
step to add it up, gives it to the step as it gives what it returns: over all stages, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, change_mark
from lightning_pfo.strategy.model.tracing.ends import deviates
from lightning_pfo.strategy.model.tracing.forms.holders import (
    LISTS,
    OF_MODULES,
    drop_last,
    holders_in,
    is_users,
    items_in,
    last,
    refill,
)
from lightning_pfo.strategy.model.tracing.tracked import Tracked, untracked
from lightning_pfo.strategy.model.tracing.trees import rewrite, tree_flatten, tree_leaves
from lightning_pfo.strategy.model.variables import Variables, known_to

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call, and its named ones."""

_NOTHING = object()


@dataclass(frozen=True)
class Place:
    """Where a call leaves tensors, or takes some away.

    Attributes:
        root: The module that keeps them, or variables that its functions name.
        path: The attribute, and keys in it, that lead to a dict, a list or an object; none: the root itself.
        keys: The attributes or keys there that get other values.
        added: How many items a list gets at its end, if it gets some.
        removed: How many it loses there; negative: at its begin.
        dropped: The keys that a dict loses.
        is_taken: Whether the step takes them away again.
    """

    root: nn.Module | Variables
    path: tuple[Any, ...]
    keys: tuple[Any, ...] = ()
    added: int = 0
    removed: int = 0
    dropped: tuple[Any, ...] = ()
    is_taken: bool = False

    @property
    def takes(self) -> bool:
        """Whether the call takes tensors away."""
        return bool(self.removed or self.dropped)

    def holder(self) -> Any:
        """The dict or list, or the attributes as a dict, as it is now.

        Raises:
            ConfigurationError: If nothing like it is there.
        """
        found = items_in(self.root)
        try:
            for key in self.path:
                found = items_in(found[key])
        except LookupError:
            raise deviates() from None
        if not isinstance(found, LISTS if self.added or self.removed else (MutableMapping, *LISTS)):
            raise deviates()
        return found

    def values(self) -> list[Any]:
        """What is there now.

        Raises:
            ConfigurationError: If nothing is.
        """
        holder = self.holder()
        try:
            return last(holder, self.added) if self.added else [holder[key] for key in self.keys]
        except LookupError:
            raise deviates() from None

    def fill(self, values: Sequence[Any]) -> None:
        """Leave values there, or take away what is.

        Raises:
            ConfigurationError: If nothing is.
        """
        holder = self.holder()
        if self.added:
            holder.extend(values)
        elif self.removed:
            items = list(holder)
            if len(items) < abs(self.removed):
                raise deviates()
            refill(holder, items[: -self.removed] if self.removed > 0 else items[-self.removed :])
        elif self.dropped:
            if any(key not in holder for key in self.dropped):
                raise deviates()
            for key in self.dropped:
                del holder[key]
        else:
            for key, value in zip(self.keys, values, strict=True):
                holder[key] = value

    def has_taken(self, holder: Any, before: Any) -> bool:
        """Whether a dict or list has lost what the call takes away."""
        if self.removed:
            return len(holder) == len(before) - abs(self.removed)
        return all(key in before and key not in holder for key in self.dropped)

    def undo(self, before: Any) -> None:
        """Let lists, and what has lost something, be as they were before the call."""
        if self.added:
            drop_last(self.holder(), self.added)
        elif self.removed:
            refill(self.holder(), before)
        for key in self.dropped:
            self.holder()[key] = before[key]


def place_of_buffer(part: nn.Module, name: str) -> Place:
    """Where a call assigns a buffer anew."""
    return Place(part, ("_buffers",), (name,))


class Leaving(Protocol):
    """What is known of a call: what it leaves beside what it returns."""

    @property
    def rewrites(self) -> bool:
        """Whether it writes into containers that it is given."""

    @property
    def returns(self) -> int:
        """Position of the argument that it returns; -1: it returns something else."""

    @property
    def left(self) -> Sequence[Place]:
        """Where its parts leave tensors."""


def roots_of(module: nn.Module) -> list[Any]:
    """Where a call of a module may leave something: in its parts, and in variables that their functions name."""
    roots: list[Any] = list(module.modules())
    for cls in dict.fromkeys(map(type, roots)):
        if is_users(cls):
            known = known_to(cls)
            roots += [known.around, *(variables for _, variables in known.variables)]
    return roots


class Kept:
    """What a module and its parts keep now, beside parameters, buffers and modules.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        roots = roots_of(module)
        self._holders: list[tuple[Any, tuple[Any, ...], Any, Any, dict[Any, object]]] = [
            (root, path, holder, list(holder) if isinstance(holder, LISTS) else dict(holder), _marks(holder))
            for root, path, holder in holders_in(roots)
        ]

    def take_left(self) -> list[tuple[Place, list[Any]]]:
        """Where tensors have been left or taken since, and what; lists are as before until it is done again."""
        places = [(place, each[3]) for each in self._holders for place in _left_in(*each)]
        found = [(place, place.values()) for place, _ in places]
        for place, before in places:
            place.undo(before)
        return found

    def has_lost_tensors(self) -> bool:
        """Whether tensors have been taken away from lists or dicts."""
        return any(
            len(holder) < len(before) and _has_tensor(list(before) if isinstance(holder, LISTS) else before)
            for _, _, holder, before, _ in self._holders
        )

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Let all be as it was if a call has failed: it is tried in another way."""
        if failed:
            self.put_back()

    def put_back(self, which: Callable[[Any], bool] = lambda _: True) -> None:
        """Let all be as it was, or some of the dicts, lists and attributes."""
        for holder, before in [(holder, before) for _, _, holder, before, _ in self._holders if which(holder)]:
            if isinstance(holder, LISTS):
                refill(holder, before)
                continue
            for key in [key for key in holder if key not in before]:
                del holder[key]
            for key, value in before.items():
                if key not in holder or holder[key] is not value:
                    holder[key] = value


def _marks(holder: Any) -> dict[Any, object]:
    pairs = enumerate(holder) if isinstance(holder, LISTS) else holder.items()
    tensors = [(key, value) for key, value in pairs if isinstance(value, torch.Tensor)]
    with DisableTorchFunctionSubclass():  # nobody else asks
        return {key: change_mark(value) for key, value in tensors}


def _left_in(root: Any, path: tuple[Any, ...], holder: Any, before: Any, marks: dict[Any, object]) -> Iterator[Place]:
    """Where a dict or list has got or lost tensors, or tensors have been changed in place."""
    if isinstance(holder, LISTS):
        added = len(holder) - len(before)
        if added > 0 and all(map(is_, holder, before)) and _has_tensor(last(holder, added)):
            yield Place(root, path, added=added)
            return
        if added < 0 and _has_tensor(before):
            if all(map(is_, holder, before)):
                yield Place(root, path, removed=-added)
            elif all(map(is_, holder, before[-added:])):
                yield Place(root, path, removed=added)
            return
        pairs = list(enumerate(holder)) if len(holder) == len(before) else []
    else:
        pairs = list(holder.items())
        lost = tuple(key for key, value in before.items() if key not in holder and _has_tensor(value))
        if lost and not (isinstance(root, nn.Module) and not path):  # an attribute that goes is the module's own
            yield Place(root, path, dropped=lost)
    now = _marks(holder)
    own: frozenset[Any] = OF_MODULES if isinstance(root, nn.Module) and not path else frozenset()
    keys = []
    for key, value in pairs:
        if key in own:
            continue
        if (before[key] if isinstance(holder, LISTS) else before.get(key, _NOTHING)) is not value:
            is_left = _has_tensor(value)
        else:  # of modules beside what needs gradients it is metrics that count
            is_left = now.get(key) != marks.get(key) and (not own or isinstance(value, Tracked) or value.requires_grad)
        if is_left:
            keys.append(key)
    if keys:
        yield Place(root, path, tuple(keys))


def _has_tensor(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))


def with_all_left(result: Any, given: Arguments, call: Leaving, values: Sequence[Any]) -> Any:
    """What a call returns together with all that it leaves, as `returned_of` takes it apart."""
    if call.rewrites:
        result = (result if call.returns < 0 else None, given)
    return (result, list(values)) if call.left else result


def returned_of(call: Leaving, result: Any, given: Arguments) -> Any:
    """What a call returns, after what it leaves is where it leaves it."""
    if call.left:
        result, values = result
        for place, of_place in zip(call.left, values, strict=True):
            place.fill(of_place)
    if not call.rewrites:
        return result
    result, changed = result
    rewrite(given, changed)
    return result if call.returns < 0 else [*given[0], *given[1].values()][call.returns]


class LeftInTrace:
    """What the calls of a trace leave, of which only what the step needs matters.

    Attributes:
        labels: Of all values that calls have left.
    """

    def __init__(self) -> None:
        self.labels: set[int] = set()
        self._found: list[tuple[Any, Any]] = []

    def note(self, event: Any, result: Any) -> None:
        """A call has returned this, together with all that it has left."""
        if event.left:
            self._found.append((event, result))
            self.labels |= {leaf.label for leaf in tree_leaves(result[1]) if isinstance(leaf, Tracked)}

    def finish(self, is_used: Callable[[int], bool]) -> None:
        """The step has returned: forget what it has not used, by label, and see what it has taken away."""
        for event, (returned, values) in self._found:
            labels = {leaf.label for leaf in tree_leaves(values) if isinstance(leaf, Tracked)}
            if any(map(is_used, labels)) or any(place.takes for place in event.left):
                pairs = zip(event.left, values, strict=True)
                event.left = tuple(
                    replace(place, is_taken=not (place.takes or _is_there(place, left))) for place, left in pairs
                )
            else:
                leaves, event.structure = tree_flatten(returned)
                event.results, event.left = event.results[: len(leaves)], ()


def _is_there(place: Place, values: Sequence[Any]) -> bool:
    try:
        now = place.holder() if place.added else place.values()
    except ConfigurationError:
        return False
    return any(item is value for item in now for value in values)


class LeftByCalls:
    """What parts of layers shall keep when a stage has run: what they have left there themselves, or what was there."""

    def __init__(self) -> None:
        self._own: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def before(self, call: Leaving) -> list[tuple[Any, Any]]:
        """What is there before a call, for `take`."""
        return [_now(place) for place in call.left]

    def take(self, call: Leaving, before: Sequence[Any]) -> list[list[Any]]:
        """What a call has left; lists lose it until `returned_of` gives it back.

        Raises:
            ConfigurationError: If it has left something else than in the trace.
        """
        found = [place.values() for place in call.left]
        for place, values, (_, old) in zip(call.left, found, before, strict=True):
            holder = place.holder()
            if place.added and (len(values) < place.added or any(value is item for value in values for item in old)):
                raise deviates()
            if place.takes and not place.has_taken(holder, old):
                raise deviates()
            place.undo(old)
            if place.is_taken:  # perhaps where the step does so is another stage
                self._undo.append(partial(_put_back, place, holder, old, values))
        self._own += found
        return found

    def left_out(self, call: Leaving, result: Any, given: Arguments) -> Any:
        """What a call would return that is left out; what stands in for the rest is not to stay."""
        if call.left:
            for place, values in zip(call.left, result[1], strict=True):
                self._undo.append(partial(_put_back, place, *_now(place), values))
        return returned_of(call, result, given)

    def put_back(self) -> None:
        """The stage has run."""
        for undo in reversed(self._undo):
            undo()
        for leaf in tree_leaves(self._own) if self._own else ():
            if isinstance(leaf, Tracked):
                untracked(leaf)
        self._undo.clear()
        self._own.clear()


def _now(place: Place) -> tuple[Any, Any]:
    """Where it leaves something, and what is there."""
    holder = place.holder()
    if place.added or place.removed:
        return holder, list(holder)
    if place.dropped:
        return holder, dict(holder)
    there = range(len(holder)) if isinstance(holder, LISTS) else holder
    return holder, {key: holder[key] if key in there else _NOTHING for key in place.keys}


def _put_back(place: Place, holder: Any, before: Any, values: Sequence[Any]) -> None:
    """Let it be as before, but for what others have left there, or taken away."""
    if place.takes:
        return
    if place.added:
        leaves = set(map(id, tree_leaves(values)))
        refill(holder, [item for item in holder if not leaves.intersection(map(id, tree_leaves(item)))])
        return
    for key, value in before.items():
        if value is not _NOTHING:
            holder[key] = value
        elif key in holder:
            del holder[key]
