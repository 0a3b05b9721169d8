"""Batches that the first rank of a pipeline loads for all: others run no loader, and call no dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_pfo.core.errors import BatchError, ConfigurationError

LOADED_BY = ("all", "first")


def check_loaded_by(name: str) -> None:
    """Check that it is known who loads batches.

    Raises:
        ConfigurationError: If not.
    """
    if name not in LOADED_BY:
        raise ConfigurationError(f"load_batches is {' or '.join(map(repr, LOADED_BY))}; got {name!r}.")


@dataclass(frozen=True)
class FirstRank:
    """What one rank of a pipeline does for all.

    Attributes:
        is_here: Whether it is this rank.
        meet: Notices if other ranks do something else.
        tell: Gives every rank what the first one has; a collective call.
        get_state: Captures the global random generators.
        set_state: Puts them into a state.
        same_state: Whether two states are equal.
    """

    is_here: bool
    meet: Callable[[str], object]
    tell: Callable[[Any], Any]
    get_state: Callable[[], Any]
    set_state: Callable[[Any], None]
    same_state: Callable[[Any, Any], bool]

    def do(self, what: str, action: Callable[[], Any]) -> Any:
        """Let the first rank do something; every rank gets what comes of it, and the random numbers it leaves.

        Raises:
            StopIteration: On every rank, if it does on the first.
            BatchError: On the others, if it fails on the first, which raises its own error.
        """
        self.meet(what)
        message, error = None, None
        if self.is_here:
            before = self.get_state()
            try:
                message = ("value", action(), None)
            except StopIteration:
                message = ("end", None, None)
            except Exception as exception:
                error = exception
                message = ("error", f"{type(exception).__name__}: {exception}", None)
            after = self.get_state()
            if not self.same_state(before, after):
                message = (*message[:2], after)
        kind, value, state = self.tell(message)
        if error is not None:
            raise error
        if state is not None and not self.is_here:
            self.set_state(state)
        if kind == "end":
            raise StopIteration
        if kind == "error":
            raise BatchError(
                f"The first rank loads batches for the others (load_batches='first'), and could not: {value}"
            )
        return value


Notes = Callable[[Any], "list[Any] | None"]
"""Where it is noted what is in each batch of a loader, of which the first rank alone knows; None: nowhere."""


class LoadedByFirst:
    """A loader that yields on every rank what it yields on the first one; else it is the loader itself.

    Args:
        loader: The loader; only the first rank iterates over it.
        first: The first rank.
        notes: Finds what is noted of its batches, which other ranks get too.
    """

    def __init__(self, loader: Any, first: FirstRank, notes: Notes) -> None:
        self.__dict__.update(loader=loader, first=first, notes=notes)

    def __iter__(self) -> Iterator[Any]:
        return _Iterator(self.loader, self.first, self.notes)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.loader, name, value)


class _Iterator(Iterator[Any]):
    def __init__(self, loader: Any, first: FirstRank, notes: Notes) -> None:
        self._loader, self._first, self._notes = loader, first, notes
        self._number = 0
        self._batches: Iterator[Any] = iter(())
        first.do("the begin of a loader", self._begin)
        self._noted_elsewhere().clear()

    def _begin(self) -> None:
        self._batches = iter(self._loader)

    def __next__(self) -> Any:
        batch, of_batch = self._first.do("a batch of a loader", self._load)
        self._number += 1
        self._noted_elsewhere().extend(of_batch)
        return batch

    def _noted_elsewhere(self) -> list[Any]:
        """What is noted on a rank that loads nothing; nothing that counts on the first one, where the loader notes."""
        noted = None if self._first.is_here else self._notes(self._loader)
        return [] if noted is None else noted

    def _load(self) -> tuple[Any, list[Any]]:
        batch = next(self._batches)
        noted = self._notes(self._loader) or []
        return batch, noted[self._number : self._number + 1]  # workers may have been told of later ones
