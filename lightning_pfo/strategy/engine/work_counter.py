"""Counting the work of an instruction: floating-point operations and bytes moved."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from lightning_pfo.core.events import InstructionWork
from lightning_pfo.strategy.compat.tensors import TorchDispatchMode, flop_registry, tree_leaves

# Whether autograd takes a gradient over or copies it depends on who still holds it, such as a thread that sends it: it
# is no work of the instruction, and another amount in every run.
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.new_empty_strided.default}


class _Counter(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Adds up what every operator computes, and the bytes it reads and writes; views move nothing, copies do not count.

    Not torch's `FlopCounterMode`: that tells modules apart, and hooks into the calls of all for it.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (getattr(func, "is_view", False) or func in _COPIES):
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, torch.Tensor):
                    self.bytes += leaf.numel() * leaf.element_size()
        formula = flop_registry.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


class WorkCounter:
    """Context manager that counts what torch operators inside it do; `work` holds the result afterwards."""

    work: InstructionWork

    def __enter__(self) -> WorkCounter:
        self._counter = _Counter()
        self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._counter.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self.work = InstructionWork(float(self._counter.flops), float(self._counter.bytes))
