"""Tensors that a step writes into: as they were before, and what earlier batches tell of large ones.

Large ones are copied at the begin of a batch, and sent at its end, once it is known that a step writes into them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.compat.tensors import change_mark
from lightning_pfo.strategy.model.reach.places import Path, named
from lightning_pfo.strategy.model.reach.untouched import write_array_back, write_back
from lightning_pfo.strategy.model.tracing.trees import tree_leaves
from lightning_pfo.strategy.step.batches.notices import warn_once

SMALL_BYTES = 2**16
"""Smaller ones are copied at the begin of each batch, whether somebody writes into them or not."""
_LOOKED_AT = 3
"""So many batches of each kind of step are looked at more closely."""
_LARGEST_BYTES = 16 * 2**20
"""Larger ones are never copied, and arrays not looked at: microbatches write into them one after the other."""


def values_of(array: Any) -> Any:
    """A copy of the values of a tensor or an array."""
    return array.copy() if isinstance(array, np.ndarray) else array.detach().clone()


def bytes_of(value: Any) -> int:
    """How much memory the tensors in a structure take."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


class TensorBefore:
    """A tensor or an array at the begin of a batch.

    Args:
        array: The tensor or array.
        copies: Whether its values are copied, so that changes can be taken back.
        compares: Whether values that are copied are compared: what writes into its `data` leaves no mark.

    Attributes:
        array: The tensor or array.
        before: Its values; None if they are not copied.
        mark: Another one after a change.
    """

    def __init__(self, array: Any, *, copies: bool, compares: bool) -> None:
        self.array = array
        self._compares = compares
        self.before: Any = values_of(array) if copies else None
        self.mark = self.mark_now()
        self._data = array.detach() if isinstance(array, torch.Tensor) else array  # in its memory, if `data` is set

    def mark_now(self) -> object:
        """The mark of what it is now."""
        return change_mark(self.array) if isinstance(self.array, torch.Tensor) else None

    def is_unchanged(self) -> bool:
        """Whether it has its memory and values, as far as that is known."""
        if isinstance(self.array, np.ndarray):
            return self.before is None or np.array_equal(self.array, self.before)
        if self.mark_now() != self.mark:
            return False
        return not (self._compares and self.before is not None) or _are_alike(self.array.detach(), self.before)

    def take_back(self) -> None:
        """Give it the memory and the values that it had."""
        if isinstance(self.array, np.ndarray):
            write_array_back(self.array, self.before)
            return
        with torch.no_grad():
            write_back(self.array, self._data, self.before)
        self.mark = self.mark_now()

    def write(self, value: Any) -> None:
        """Let it have other values."""
        if isinstance(self.array, torch.Tensor) and self.array.shape != value.shape:  # its `data` has been set
            self.array.data = value
            return
        with torch.no_grad():
            self.array[...] = value


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # no numbers are alike


class LargeTensors:
    """Which large tensors and arrays a step writes into, and into the `data` of which others, as has been seen.

    Attributes:
        copies_all: Whether all are copied at the begin of the next batch, as of the first one of each kind of step.
        compares_all: Whether the values of all that are copied are compared, as of the first batches.
    """

    def __init__(self, *, copies_all: bool = False, compares_all: bool = False) -> None:
        self.copies_all, self.compares_all = copies_all, compares_all
        self._written: set[Path] = set()
        self._unmarked: set[Path] = set()

    def before(self, path: Path, array: Any) -> TensorBefore:
        """A tensor at the begin of a batch."""
        compares = self.compares_all or path in self._unmarked
        return TensorBefore(array, copies=self.is_copied(path, array), compares=compares)

    def is_copied(self, path: Path, array: Any) -> bool:
        """Whether a tensor is copied at the begin of a batch, so that what a run writes into it can be taken back."""
        size = array.nbytes
        # buffers are mostly not written into, or given to others by the stage that does so
        may_be = (self.copies_all and path[0] != "_buffers") or path in self._written
        return size <= SMALL_BYTES or (size <= _LARGEST_BYTES and may_be)

    def note(self, path: Path, tensor: TensorBefore, *, is_told: bool) -> None:
        """A run of the step has written into a tensor.

        Args:
            path: Where it is.
            tensor: The tensor.
            is_told: Whether a warning says what that costs, as where the step is run to its end.
        """
        size = tensor.array.nbytes
        if tensor.mark_now() == tensor.mark:
            self._unmarked.add(path)
        if size <= SMALL_BYTES or path in self._written:
            return
        self._written.add(path)
        if not is_told:
            return
        how = ""
        if size > _LARGEST_BYTES:
            how = (
                f" It has more than {_LARGEST_BYTES / 2**20:.0f} MiB, so microbatches write into it one after the "
                f"other, which is right for rows of samples, and not for means over the batch."
            )
        warn_once(
            f"A step writes into {named(path)}. Its {size / 2**20:.1f} MiB are sent to all ranks after every batch in "
            f"which it does so.{how} Keep less, or write after the step (in on_train_batch_end, or your loop), on all "
            f"ranks."
        )


class Earlier:
    """What is known from earlier batches.

    Attributes:
        large: Which large tensors are written into.
        meters: Which objects count samples, and which do not.
        number: The number of the batch among those of its kind that are looked at; 0: it is not.
    """

    def __init__(self) -> None:
        self.large = LargeTensors()
        self.meters: dict[Path, bool] = {}
        self.number = 0
        self._batches: Counter[str] = Counter()

    def begin(self, kind: str) -> None:
        """A batch of a kind of step begins."""
        self.large.copies_all = kind not in self._batches
        self._batches[kind] = min(self._batches[kind] + 1, _LOOKED_AT + 1)
        self.number = self._batches[kind] if self._batches[kind] <= _LOOKED_AT else 0
        self.large.compares_all = self.number > 0
