"""Objects of libraries that a step changes: nobody knows how to take that back, so they are named.

On the first batches of each kind of step a print of what they hold is taken: before, after the first microbatch, and at
the end. What the first of several runs alone changes, or that of the first batch, is a cache.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, change_mark
from lightning_pfo.strategy.model.reach.places import PLAIN, Path, named, takes_only
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.model.variables import changes_by_itself
from lightning_pfo.strategy.step.batches.notices import warn_once

_DEPTH = 5
_MOST = 2_000
"""Of an object with more in it the rest is not looked at."""
_SMALL_BYTES = 2**16


class OpaqueLook:
    """Looks at objects of libraries while a batch is run.

    Args:
        found: The objects, by their places.
        is_first: Whether it is the first batch of its kind.
    """

    def __init__(self, found: Mapping[Path, Any], *, is_first: bool) -> None:
        self._found = found
        self._runs = 0
        self._before = {} if is_first else self._now()

    def after_run(self) -> None:
        """A run of the step is over."""
        self._runs += 1
        if self._runs == 1:
            self._after_first = self._now()

    def end(self) -> None:
        """All runs of the batch are over."""
        now = self._now()
        before = self._after_first if self._runs > 1 else self._before or now
        for path, value in self._found.items():
            if now[path] != before[path]:
                kind = type(value)
                warn_once(
                    f"A step changes {named(path)}, of {kind.__module__}.{kind.__qualname__}, which only its library "
                    f"knows how to copy. So each microbatch changes it, on each rank of the pipeline that comes to "
                    f"that line, and so do the runs that compare the first batches with one device. Change it "
                    f"after the step (in on_train_batch_end, or your loop), by what the step returns; or keep numbers, "
                    f"lists and tensors in attributes, where they are those of one device."
                )

    def _now(self) -> dict[Path, Any]:
        with following(None), DisableTorchFunctionSubclass():  # our question, not the step's
            return {path: _Print().of(value, _DEPTH) for path, value in self._found.items()}


class _Print:
    """What an object holds, so that it can be compared."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def of(self, value: Any, depth: int) -> Any:
        if type(value) in PLAIN:
            return repr(value) if type(value) in (float, complex) else (type(value), value)
        if not depth or len(self._seen) > _MOST or id(value) in self._seen:
            return None
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), change_mark(value)
        if isinstance(value, np.ndarray):
            return value.shape, value.tobytes() if value.nbytes <= _SMALL_BYTES and value.dtype != object else None
        if isinstance(value, dict):
            return len(value), [(str(key), self.of(item, depth - 1)) for key, item in list(value.items())[:_MOST]]
        if isinstance(value, (list, tuple, deque)):
            return len(value), [self.of(item, depth - 1) for item in list(value)[-_MOST:]]
        if isinstance(value, io.IOBase):
            return _position(value)
        if isinstance(value, type) or changes_by_itself(type(value)):
            return None
        attributes = [self.of(item, depth - 1) for item in list(getattr(value, "__dict__", {}).values())]
        return _length(value), attributes or _digest(value)


def _length(value: Any) -> int | None:
    try:
        return len(value) if isinstance(value, Sized) else None
    except Exception:  # it is somebody else's
        return None


def _digest(value: Any) -> Any:
    """Of what is written in C: what would be saved of it."""
    try:
        is_small = value.__sizeof__() <= _SMALL_BYTES
        return pickle.dumps(value) if is_small and not hasattr(value, "__next__") else None
    except Exception:
        return None


def _position(file: Any) -> int | None:
    """Of a file: writers that were made of it before do not come by."""
    try:
        return int(file.tell()) if takes_only(file) else None
    except (OSError, ValueError):  # it is closed, or a terminal
        return None
