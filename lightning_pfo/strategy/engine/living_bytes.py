"""Counting the memory of the tensors that operators make, as long as these live."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lightning_pfo.strategy.compat.tensors import READS_VALUE, FakeTensor, TorchDispatchMode, memory_of, tree_leaves
from lightning_pfo.strategy.parallel.dtensor import local

_CUDA_BLOCK = 512
"""torch's allocator for CUDA gives multiples of so many bytes."""
_WITH_MEMORY = (torch.Tensor, torch.nn.Parameter, FakeTensor)


def bytes_on(device: torch.device, num_bytes: int) -> int:
    """What a tensor of some bytes takes on a device."""
    return -(-num_bytes // _CUDA_BLOCK) * _CUDA_BLOCK if device.type == "cuda" else num_bytes


class LivingBytes(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Context manager that adds up the memory of all that is made inside it, while it is not let go of.

    Tensors without values (`FakeTensor`) count as what they stand for. Where one of them is asked for its value, the
    answer is one, or no.

    Args:
        device: Where memory is counted.

    Attributes:
        now: Bytes that are there.
        peak: The most there were since this was set.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._device = device
        self._known: dict[int, Any] = {}  # references to storages by their address

    def leave_out(self, tensors: Any) -> None:
        """Do not count some tensors, in any nested structure."""
        for tensor in _tensors_in(tensors):
            self._add(tensor, counts=False)

    def count(self, tensors: Any) -> None:
        """Count tensors that were made elsewhere."""
        for tensor in _tensors_in(tensors):
            self._add(tensor, counts=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is READS_VALUE and isinstance(args[0], FakeTensor):
            return torch.ones((), dtype=args[0].dtype).item() if args[0].dtype != torch.bool else False
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors_in(result)
        if any(memory_of(tensor) not in self._known for tensor in made):
            self.leave_out((args, kwargs))  # a view of what nobody made here takes nothing
            self.count(made)
        return result

    def _add(self, tensor: torch.Tensor, *, counts: bool) -> None:
        key = memory_of(tensor)
        if key in self._known or tensor.device.type != self._device.type:
            return
        storage = tensor.untyped_storage()
        num_bytes = bytes_on(self._device, storage.nbytes()) if counts else 0

        def gone(_: Any) -> None:
            self._known.pop(key, None)
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    """Those that have memory of their own."""
    tensors = [local(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [t for t in tensors if t.layout == torch.strided and type(t) in _WITH_MEMORY]
