"""Layers that go over time, in form: a few time steps tell what all return, and what autograd keeps of them.

Without values torch goes through the time steps of a GRU one by one in Python: one of 100 steps takes 30 times as long
to trace as to compute, and each length of a batch is traced anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.compat.tensors import memory_of

_OVER_TIME = (torch.gru, torch.rnn_tanh, torch.rnn_relu)
"""An LSTM's steps are one operation; nothing goes through them."""
_FEW = 2
"""Time steps after which each keeps as much as the one before it."""


class Saved:
    """Adds up the memory that autograd keeps in a context, each piece once, and keeps nothing of it after that.

    What autograd keeps would be kept for ever if it led to itself, as a result does that is kept for its own backward.

    Args:
        known: Tensors that are there anyway.
    """

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        self.num_bytes = 0
        # the tensors are held, so that no other memory gets the place of theirs
        self._known = {memory_of(tensor): tensor for tensor in known}
        self._boxes: list[list[torch.Tensor]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self._known.setdefault(memory_of(tensor), tensor) is tensor:
            self.num_bytes += tensor.numel() * tensor.element_size()
        self._boxes.append([tensor])
        return self._boxes[-1]

    def _unpack(self, box: list[torch.Tensor]) -> torch.Tensor:
        return box[0]

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)
        for box in self._boxes:
            box.clear()
        self._known.clear()


class FewTimeSteps(TorchFunctionMode):
    """Lets GRUs and RNNs go through a few time steps, of tensors without values."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_over_time = any(func is each for each in _OVER_TIME) and not kwargs
        if is_over_time and isinstance(args[2], Sequence) and args[0].device.type == "cpu":  # else it is packed
            return _few_steps(func, *args)
        return func(*args, **(kwargs or {}))


def _few_steps(function: Callable[..., Any], data: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer returns: outputs for all time steps, and its state; see torch's `RNNBase.forward` for arguments."""
    _, weights, *_, batch_first = args
    time = 1 if batch_first else 0
    length = data.shape[time]
    if length <= _FEW + 1:
        return function(data, *args)  # type: ignore[no-any-return]
    kept = []
    for steps in (_FEW, _FEW + 1):
        with Saved(weights) as saved:
            outputs, last = function(data.narrow(time, 0, steps), *args)
        kept.append(saved.num_bytes)
    fewer, more = kept
    first = outputs.narrow(time, 0, 1).transpose(0, time)  # in memory, too, time comes first
    num_bytes = fewer + (length - _FEW) * (more - fewer)
    outputs = _Keeping.apply(first.expand(length, -1, -1).contiguous(), num_bytes)  # type: ignore[no-untyped-call]
    return outputs.transpose(0, time), last


class _Keeping(torch.autograd.Function):
    """Passes a tensor on, and keeps so many bytes for the backward, beside what is kept before it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
        ctx.save_for_backward(tensor.new_empty(num_bytes, dtype=torch.uint8))
        return tensor.view_as(tensor)
