"""Activations that wait for their backward in the host's memory.

On CUDA they are copied beside the computation, on a stream of their own: to the host when they are saved, and back a
few before they are needed.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from lightning_pfo.strategy.compat.tensors import FakeTensor, memory_of, version_of

_LEAST_BYTES = 1 << 16
"""Smaller tensors stay: a copy of them takes about as long."""
_AHEAD = 2
"""So many tensors are on their way back before they are asked for."""
_VIEWS_AND_CASTS = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "Unsqueeze", "Alias", "ToCopy")
)
"""Functions of autograd that make another form of a tensor."""


class Offload:
    """Copies what autograd saves of forwards to the host, and back in backwards.

    Parameters, casts of them, and small tensors stay where they are.

    Args:
        device: Where forwards run; on a CPU the copies are in the same memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def of_forward(self) -> saved_tensors_hooks:
        """A context for one forward of a microbatch on a stage."""
        return _Forward(self._device, self._stream)


class _Forward(saved_tensors_hooks):
    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        super().__init__(self._pack, _unpack)
        self._device = device
        self._stream = stream
        self._known: dict[Any, _Away] = {}
        self._last: _Away | None = None

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for away in self._known.values():
            away.here = None
        self._known.clear()
        self._last = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if (
            tensor.device.type != self._device.type
            or type(tensor) not in (torch.Tensor, FakeTensor)
            or tensor.layout != torch.strided
            or tensor.nbytes < _LEAST_BYTES
            or _is_of_parameter(tensor)
        ):
            return tensor
        # what layers save alike is one; all are held to the end of the forward, so that no other gets the place of one
        key = (memory_of(tensor), version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
        if key not in self._known:
            self._known[key] = self._last = _Away(tensor.detach(), self._last, self._stream)
        return self._known[key]


class _Away:
    """A tensor in the host's memory.

    Args:
        tensor: The tensor; held until `here` is set to None.
        before: The one that was saved before it, which is asked for after it.
        stream: Where it is copied; None: at once.
    """

    def __init__(self, tensor: torch.Tensor, before: _Away | None, stream: torch.cuda.Stream | None) -> None:
        self.here: torch.Tensor | None = tensor
        self._before = before
        self._stream = None if isinstance(tensor, FakeTensor) else stream
        self._device = tensor.device
        self._coming: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._back: weakref.ref[torch.Tensor] | None = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(self._stream)
        with self._on_stream():
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=self._stream is not None)
            self._host.copy_(tensor, non_blocking=True)

    def fetched(self) -> torch.Tensor:
        """The tensor on the device."""
        tensor = self.here
        if tensor is None and self._back is not None:
            tensor = self._back()  # it is still used
        if tensor is None:
            tensor, self._coming = self._start(), None
            self._back = weakref.ref(tensor)
            if self._stream is not None and self._arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(self._arrived)
                tensor.record_stream(torch.cuda.current_stream(self._device))
                self._start_those_before()
        return tensor

    def _start(self) -> torch.Tensor:
        if self._coming is None:
            with self._on_stream():
                self._coming = torch.empty_like(self._host, device=self._device)
                self._coming.copy_(self._host, non_blocking=True)
            self._arrived = None if self._stream is None else self._stream.record_event()
        return self._coming

    def _start_those_before(self) -> None:
        before = self._before
        for _ in range(_AHEAD):
            if before is not None:
                if before._back is None:
                    before._start()
                before = before._before

    def _on_stream(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _unpack(kept: Any) -> torch.Tensor:
    tensor: torch.Tensor = kept.fetched() if isinstance(kept, _Away) else kept
    return tensor


def _is_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter (or what a stage has received), or only its view or cast: these are there anyway."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS_AND_CASTS:
        node = node.next_functions[0][0]
    return (tensor.is_leaf and tensor.requires_grad) or hasattr(node, "variable")
