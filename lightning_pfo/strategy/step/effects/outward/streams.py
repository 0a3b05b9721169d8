"""Iterators and files that a step reaches, of which nobody can make a copy: for each run others stand in for them.

An iterator gives each run of the step, on all stages and microbatches and in traces, the same items, and goes on by
what one run has taken when the batch is done, on every rank. What a run writes into a file, or says to something else
that only takes (a writer of rows, a writer of TensorBoard), is noted like calls of loggers, and written once for a
batch by the first rank of the pipeline; see `calls`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.reach.places import Path, Places, named, takes_only
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.step.effects.outward.calls import is_kept_everywhere
from lightning_pfo.strategy.step.effects.outward.noted import Note, Noted

_AHEAD: dict[int, tuple[Any, list[Any]]] = {}
"""Items that were taken from iterators ahead of their batch, as by a trace; by the id of the iterator, kept alive."""
_ENDED = object()


class Streams:
    """The iterators and files that are reached at the begin of a batch.

    Args:
        found: They, by their places.
        holders: What has them, by its place.
    """

    def __init__(self, found: Mapping[Path, Any], holders: Mapping[Path, Any]) -> None:
        self._slots: dict[Path, Any] = {}
        self._found: dict[Path, Any] = {}
        for path, stream in found.items():
            slot = path[:-1]
            while slot and slot not in holders:  # a tuple is replaced as a whole
                slot = slot[:-1]
            if slot in holders:
                self._found[path] = stream
                self._slots[path[: len(slot) + 1]] = holders[slot]
        self._stand_ins: dict[int, Any] = {}
        self._replaced: list[tuple[Any, Any, Any, Any]] = []
        self._files: dict[int, _Written] = {}
        self._taken: dict[Path, int] = {}

    def enter(self, note: Note) -> None:
        """A run of the step begins; `note` takes what it writes."""
        for path, stream in self._found.items():
            if isinstance(stream, io.IOBase) and takes_only(stream):
                if id(stream) not in self._files:
                    self._files[id(stream)] = _Written(path, stream, note)
            elif id(stream) not in self._stand_ins:  # it may have several places
                noted = Noted((("stream", path),), note) if takes_only(stream) else _Again(path, stream)
                self._stand_ins[id(stream)] = noted
        for slot, holder in self._slots.items():
            value = _item(holder, slot[-1])
            stand_in = _replaced(value, self._stand_ins)
            if stand_in is not value:
                holder[slot[-1]] = stand_in
                self._replaced.append((holder, slot[-1], value, stand_in))

    def leave(self, *, has_ended: bool) -> None:
        """It is over; `has_ended` if it has run to the end of the step, so that it counts what it has taken."""
        for holder, key, value, stand_in in self._replaced:
            if _item(holder, key) is stand_in:
                holder[key] = value
        for stand_in in self._stand_ins.values():
            if has_ended and type(stand_in) is _Again and stand_in.taken:
                self._taken[stand_in.path] = max(self._taken.get(stand_in.path, 0), stand_in.taken)
        self._replaced, self._stand_ins = [], {}
        for written in self._files.values():
            written.end()
        self._files = {}

    def taken(self) -> dict[Path, int]:
        """How many items the microbatches have taken from iterators."""
        return self._taken

    def go_on(self, taken: Mapping[Path, int]) -> None:
        """The batch is done: go on by what was taken."""
        for path, number in taken.items():
            if path in self._found:
                _skip(self._found[path], number)

    def outlets(self, *, is_first: bool) -> dict[Path, Any]:
        """What is written into on this rank: on others than the first only what is in memory."""
        found = {path: stream for path, stream in self._found.items() if takes_only(stream)}
        return {path: stream for path, stream in found.items() if is_first or is_kept_everywhere(stream)}


@contextmanager
def others_stand_in(owner: nn.Module, modules: Mapping[str, nn.Module], note: Note) -> Iterator[None]:
    """Let a step that is only tried take nothing from iterators, and write nothing.

    Args:
        owner: The user's module.
        modules: Other modules whose attributes count, by name.
        note: Takes what it writes.
    """
    places = Places(owner, modules)
    streams = Streams(places.streams, places.containers)
    streams.enter(note)
    try:
        yield
    finally:
        with following(None):
            streams.leave(has_ended=False)


class _Again:
    """Stands for an iterator of which each run gets the same items."""

    def __init__(self, path: Path, stream: Any) -> None:
        self.path = path
        self._stream = stream
        self._items = _AHEAD.get(id(stream), (stream, []))[1]
        self.taken = 0

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._stream)

    def __iter__(self) -> _Again:
        return self

    def __next__(self) -> Any:
        if self.taken == len(self._items):
            item = _drawn(self._stream)
            if item is _ENDED:
                raise StopIteration
            self._items.append(item)
            _AHEAD[id(self._stream)] = (self._stream, self._items)
        self.taken += 1
        return self._items[self.taken - 1]

    def readline(self) -> Any:
        """Of a file that is read: the next line."""
        return next(self, "" if isinstance(self._stream, io.TextIOBase) else b"")

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        return partial(self._move, name) if name in _MOVES else value

    def _move(self, name: str, *args: Any) -> Any:
        if name == "send" and args == (None,):
            return next(self)
        raise ConfigurationError(
            f"A step calls {named(self.path)}.{name}(...). It runs for each microbatch and on each stage, and each run "
            f"would move the {type(self._stream).__name__} on, which nobody can put back. Take from it by next(...) "
            f"(lines of a file by readline()), or call {name} before the step (in on_train_batch_start)."
        )


_MOVES = frozenset(("send", "throw", "close", "read", "read1", "readall", "readinto", "readlines", "seek"))
"""Methods by which an iterator, or a file that is read, comes to another place."""


def _replaced(value: Any, stand_ins: Mapping[int, Any]) -> Any:
    """What stands for a stream, or for a tuple with some; others stand for themselves."""
    if isinstance(value, tuple) and (type(value) is tuple or hasattr(value, "_fields")):
        items = [_replaced(item, stand_ins) for item in value]
        if all(map(is_, items, value)):
            return value
        return tuple(items) if type(value) is tuple else type(value)(*items)
    return stand_ins.get(id(value), value)


def _drawn(stream: Any) -> Any:
    """The next item, as it is where no step is followed or tried."""

    def draw() -> Any:
        return next(stream, _ENDED)

    with following(None):
        if type(torch.empty(0)) is torch.Tensor:
            return draw()
        return _in_thread(draw)  # which has no mode in which tensors have no values


def _in_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _skip(stream: Any, number: int) -> None:
    _, items = _AHEAD.pop(id(stream), (stream, []))
    for _ in range(number - len(items)):
        if _drawn(stream) is _ENDED:
            break
    if items[number:]:
        _AHEAD[id(stream)] = (stream, items[number:])


class _Written:
    """Takes what a run writes into a file: all of it is one call."""

    def __init__(self, path: Path, file: Any, note: Note) -> None:
        self._path = path
        self._file = file
        self._note = note
        self._parts: list[Any] = []
        self._is_flushed = False
        self._methods = {"write": self._write, "writelines": self._write_lines, "flush": self._flush}
        self._before = {name: vars(file)[name] for name in self._methods if name in vars(file)}
        vars(file).update(self._methods)

    def end(self) -> None:
        """The run is over."""
        for name in self._methods:
            vars(self._file).pop(name, None)
        vars(self._file).update(self._before)
        target = ("stream", self._path)
        if self._parts:
            whole = "".join(self._parts) if isinstance(self._parts[0], str) else b"".join(self._parts)
            self._note(((target, ("attribute", "write")), (whole,), {}))
        if self._is_flushed:
            self._note(((target, ("attribute", "flush")), (), {}))

    def _write(self, text: Any, /) -> int:
        if isinstance(self._file, io.TextIOBase) != isinstance(text, str):
            raise TypeError(f"a {type(self._file).__name__} takes other text than a {type(text).__name__}")
        self._parts.append(text if isinstance(text, str) else bytes(text))
        return len(text)

    def _write_lines(self, lines: Sequence[Any], /) -> None:
        for line in lines:
            self._write(line)

    def _flush(self) -> None:
        self._is_flushed = True


def _item(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except LookupError:
        return None
