"""Each run of a step has its microbatch as it came: traces, comparisons and several stages of a rank run it anew.

Steps take labels out of dicts (`batch.pop("labels")`) and write into tensors (`images.div_(255)`). Containers are made
anew for each run, which costs little. Tensors are copied until a step of their kind has been seen to leave them alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.parallel.compat import version_of
from lightning_pfo.strategy.step.batches.structures import PLAIN, has_samples, holds_tensors, parts_of


class FreshBatches:
    """Lets each run of a step have a batch of its own.

    Attributes:
        writes: Whether a step has been seen to write into tensors of its batch.
    """

    def __init__(self) -> None:
        self.writes = False
        self._known: set[str] = set()

    def given_to(self, kind: str, step: Callable[..., Any]) -> Callable[..., Any]:
        """A step of a kind (such as `train`), on batches of its own."""

        def run(batch: Any, *rest: Any) -> Any:
            if kind in self._known and not self.writes:
                return step(anew(batch, copies=False), *rest)
            own = anew(batch, copies=True)
            before = [(tensor, version_of(tensor)) for tensor in _tensors_of(own)]
            try:
                return step(own, *rest)
            finally:  # stages that are not the last end by an exception
                self._known.add(kind)
                self.writes = self.writes or any(version_of(tensor) != version for tensor, version in before)

        return run


def anew(value: Any, *, copies: bool) -> Any:
    """A batch in new containers.

    Args:
        value: The batch, or a part of it.
        copies: Whether tensors and other values with samples are copied; else they are the same.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return value.clone() if copies else value
    if kind in PLAIN:
        return value
    if kind is dict:
        return {key: anew(part, copies=copies) for key, part in value.items()}
    if kind is list:
        return [anew(part, copies=copies) for part in value]
    if kind is tuple:
        return tuple(anew(part, copies=copies) for part in value)
    if isinstance(value, torch.Tensor):  # of a class of its own, such as bounding boxes
        return value.clone() if copies else value
    if has_samples(value):
        return copy.deepcopy(value) if copies else copy.copy(value)
    parts = parts_of(value, objects=holds_tensors(value))
    if parts is None:
        return value
    try:
        return parts.rebuild([anew(part, copies=copies) for part in parts.values])
    except BatchError:  # a mapping that nobody but its user makes
        return value


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) not in PLAIN and not has_samples(value):
        parts = parts_of(value, objects=holds_tensors(value))
        for part in () if parts is None else parts.values:
            yield from _tensors_of(part)
