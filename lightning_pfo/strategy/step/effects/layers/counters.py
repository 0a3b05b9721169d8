"""A buffer of one element that a layer changes with each call: a number of steps, a temperature."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from lightning_pfo.strategy.compat.tensors import change_mark
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder

_LARGEST = 2**22
"""Elements of a buffer or parameter whose values are looked at."""


class Counter:
    """A buffer at the begin of a batch; each microbatch has one of its own that begins so, as graphs may hold it.

    Args:
        buffer: The buffer.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._mark = change_mark(buffer)
        self._value = buffer.detach().clone()
        self._before: tuple[torch.Tensor, tuple[int, int]] = (buffer, self._mark)

    def begin(self, buffers: dict[str, Any], name: str) -> None:
        """A microbatch begins: where an earlier one has changed the buffer, there is another one."""
        now = buffers[name]
        if now is not self._buffer or change_mark(now) != self._mark:
            buffers[name] = now = self._value.clone()
        self._before = now, change_mark(now)

    def growth(self, buffers: dict[str, Any], name: str) -> torch.Tensor | None:
        """By how much it has grown in the microbatch; None: nobody has changed it."""
        now, (before, mark) = buffers[name], self._before
        if not isinstance(now, torch.Tensor) or (now is before and change_mark(now) == mark):
            return None
        return now.detach().double() - self._value.double()

    def end(self, buffers: dict[str, Any], name: str, by: torch.Tensor) -> None:
        """The batch is over, in which it has grown by so much: the buffer itself is there again."""
        value = self._value.double() + by
        self._put(buffers, name, value if self._value.is_floating_point() else value.round())

    def put_back(self, buffers: dict[str, Any], name: str) -> None:
        """Let the buffer itself be there, as it was."""
        self._put(buffers, name, self._value)

    def _put(self, buffers: dict[str, Any], name: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            self._buffer.copy_(value)
        buffers[name] = self._buffer


def is_plain(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether a tensor has values here, in memory of the usual kind."""
    return type(tensor) is torch.Tensor and tensor.layout == torch.strided and not is_placeholder(tensor)


def has_sum(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values that can be looked at, and not too many."""
    return is_plain(tensor) and tensor.numel() <= _LARGEST


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """All that a tensor is made of: of complex numbers both parts."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
