"""Changes to objects of torch, Lightning, Accelerate and users, all undone at once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CellType
from typing import Any
from weakref import WeakSet

_ABSENT = object()


class Patches(ExitStack):
    """An `ExitStack` for what is changed while a model is split: closing it undoes all, the last first."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[tuple[Any, str, Any, Any]] = []
        self._copies: dict[str, WeakSet[Any]] = {}  # by the name of the attribute

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object or class until the stack is closed.

        Then the owner has again what it had itself, or what its class has. What somebody else has set since stays.
        """
        before = vars(owner).get(name, _ABSENT)
        _assign(owner, name, value)
        self._made.append((owner, name, value, before))
        self.callback(self._undo)

    def set_cell(self, cell: CellType, value: Any) -> None:
        """Set what a variable of a closure holds until the stack is closed; see `set`."""
        before, cell.cell_contents = cell.cell_contents, value

        def put_back() -> None:
            if cell.cell_contents is value:
                cell.cell_contents = before

        self.callback(put_back)

    def note_copy(self, owner: Any, name: str) -> None:
        """An object is a copy of one with a changed attribute; it loses that one when the stack is closed."""
        if not self._copies:
            self.callback(self._undo_copies)
        self._copies.setdefault(name, WeakSet()).add(owner)

    def _undo_copies(self) -> None:
        self._take_from_copies()
        self._copies.clear()

    def _take_from_copies(self) -> list[tuple[Any, str, Any]]:
        return [
            (owner, name, vars(owner).pop(name))
            for name, owners in self._copies.items()
            for owner in owners
            if name in vars(owner)
        ]

    def _undo(self) -> None:
        owner, name, value, before = self._made.pop()
        if vars(owner).get(name, _ABSENT) is value:
            _assign(owner, name, before)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let objects be as they were while the context is open."""
        copies = self._take_from_copies()
        undone = []
        for owner, name, value, before in reversed(self._made):
            if vars(owner).get(name, _ABSENT) is value:
                _assign(owner, name, before)
                undone.append((owner, name, value))
        try:
            yield
        finally:
            for owner, name, value in [*copies, *reversed(undone)]:
                _assign(owner, name, value)


def _assign(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _ABSENT:
        del vars(owner)[name]
    else:
        vars(owner)[name] = value  # past `__setattr__`, in which modules and metrics do other things


@contextmanager
def all_of(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Several contexts as one; the first is the outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextmanager
def unwarned(message: str) -> Iterator[None]:
    """Ignore warnings that match a regular expression; filters that others add meanwhile stay.

    Past `warnings.filterwarnings`, which lets each warning of the process that is said once be said once more.
    """
    added = ("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0)
    warnings.filters.insert(0, added)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
