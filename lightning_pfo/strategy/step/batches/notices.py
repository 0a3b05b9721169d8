"""What users are told of their batches, once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

_log = logging.getLogger(__name__)
_said: set[str] = set()
"""No cache of a function: traces clear those, and the same would be said again."""
_is_trial = False


def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same one before: batches come again and again."""
    if message not in _said and not _is_trial:
        _said.add(message)
        _log.warning(message)


@contextmanager
def trial() -> Iterator[None]:
    """A batch is put together to see how while the context is open: what is to be said is said when it counts."""
    global _is_trial
    before, _is_trial = _is_trial, True
    try:
        yield
    finally:
        _is_trial = before


def tell_of_counted(model: nn.Module) -> None:
    """Name the first layer whose gradients depend on how often an index comes."""
    for name, module in model.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            warn_once(
                f"{name!r} divides its gradients by how often an index comes (scale_grad_by_freq=True): in each "
                f"microbatch, as when gradients are accumulated; on one device in the batch."
            )
            return


def tell_of_buffers(kind: str, names: Iterable[str], number: int) -> None:
    """Name the first of some buffers that the step changes for each of so many microbatches before its last stage."""
    if name := min(names, default=""):
        warn_once(
            f"The step changes the buffer self.{name} between layers: once for each of {number} microbatches, which "
            f"find there what earlier ones have left, as when gradients are accumulated; on one device once for the "
            f"batch (a moving average goes further). To change it once, keep in the step what it is made from "
            f"(self.rows = rows.detach(), which is that of the whole batch on every rank) and change the buffer after "
            f"the step (in on_{kind}_batch_end)."
        )
