"""A first batch, taken before training from copies of its loaders: training misses nothing, and draws the same numbers.

Loaders and datasets count, shuffle by generators of their own, or go on in the next epoch where they were. Where they
cannot be copied, those with an index are read themselves, and what they keep in attributes is put back; others are not.
What the script and users' classes hold for all loaders is put back in any case.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from lightning_pfo.strategy.compat.patches import unwarned
from lightning_pfo.strategy.model.reach.places import Places, takes_only
from lightning_pfo.strategy.model.reach.untouched import attributes_untouched, places_untouched
from lightning_pfo.strategy.model.variables import is_of_library

_log = logging.getLogger(__name__)

_MOST_OBJECTS = 1_000_000
_MOST_BYTES = 256 * 2**20
"""Loaders that hold more of Python's objects are not copied: it would take seconds."""

_LARGE_ARRAY_BYTES = 2**20
"""Larger arrays are data, which a copy shares."""

_SHARED = (type, FunctionType, BuiltinFunctionType, ModuleType)


@contextmanager
def read_ahead(reader: Any, loaders: Sequence[Any], owners: Sequence[Any]) -> Generator[Any, None, None]:
    """What a first batch can be taken from while the context is open. Global generators are the caller's to put back.

    Args:
        reader: What training will iterate over.
        loaders: The loaders of which that takes batches; itself, where it is one.
        owners: The model and its Trainer. They are not copied, so a dataset that makes its samples by them is not
            read ahead, unless it has an index.

    Yields:
        A copy, the reader itself, or None: a batch, or something of it, would be missed in training.
    """
    source, held = None, list(owners)
    pickler = _Pickler(_Bounded(), owners)
    try:
        source = _copied(pickler, reader, loaders)
    except Exception as error:  # users' own methods for copies may raise any
        if all(map(_has_index, loaders)):
            source = reader
            held += [part for x in loaders for part in (x, x.sampler, x.batch_sampler, x.dataset)]
        how = "before training begins" if source is None else "but by its index"
        _log.debug("No first batch is read %s, as its loader cannot be copied: %s", how, error)
    shared = Places(SimpleNamespace(called=pickler.functions), classes=pickler.classes)
    if not all(map(takes_only, shared.streams.values())):
        _log.debug("No first batch is read before training begins: its loader reads from a shared iterator or file")
        source = None
    with ExitStack() as stack:
        for holder in held:
            stack.enter_context(attributes_untouched(holder))
        stack.enter_context(places_untouched(shared))
        yield source


def _has_index(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _copied(pickler: _Pickler, reader: Any, loaders: Sequence[Any]) -> Any:
    """A copy with all that has a state, but for owners."""
    sources = [getattr(loader, "dataset", loader) for loader in loaders if not _has_index(loader)]
    pickler.dump(sources)
    pickler.may_reach_owners = True
    pickler.dump(reader)
    pickler.file.seek(0)
    unpickler = _Unpickler(pickler.file, pickler.shared)
    unpickler.load()  # first, as the second one refers to it
    with unwarned(".*LeafSpec.*"):  # of torch, at the class of what Lightning keeps with loaders
        return unpickler.load()


class _Bounded(io.BytesIO):
    @override
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _MOST_BYTES:  # before it takes the memory
            raise ValueError(f"it holds more than {_MOST_BYTES} bytes")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Writes what is copied, and notes what is shared: the user's functions and the classes of objects among it."""

    def __init__(self, file: io.BytesIO, owners: Sequence[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.file = file
        self.shared: dict[int, Any] = {}
        self.functions: list[FunctionType] = []
        self.classes: dict[type, None] = {}
        self.may_reach_owners = False
        self._owners = {id(owner) for owner in owners}
        self._count = 0

    @override
    def persistent_id(self, obj: Any) -> int | None:
        self._count += 1
        if self._count > _MOST_OBJECTS:
            raise ValueError(f"it holds more than {_MOST_OBJECTS} objects")
        self._note(obj)
        if id(obj) in self._owners:
            if not self.may_reach_owners:
                raise ValueError("its dataset reaches the model or its Trainer")
        elif not isinstance(obj, _SHARED) and not _is_data(obj):
            return None
        self.shared[id(obj)] = obj
        return id(obj)

    def _note(self, obj: Any) -> None:
        cls: type = type(obj)
        if cls is FunctionType:
            self.functions.append(obj)
        elif cls not in self.classes and not is_of_library(cls, ()):
            self.classes[cls] = None


def _is_data(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.nbytes > _LARGE_ARRAY_BYTES


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: dict[int, Any]) -> None:
        super().__init__(file)
        self._shared = shared

    @override
    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]
