"""What is to be noticed while a step is traced and is no function of torch with a tracked tensor."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.model.tracing.functions import is_metadata
from lightning_pfo.strategy.model.tracing.tracked import Run, Tracked, current_run
from lightning_pfo.strategy.parallel.compat import TorchDispatchMode, tree_leaves


class ParametersSeen(TorchFunctionMode):
    """Notes parameters that functions are given without any tracked tensor.

    Args:
        see: Told the tensors of each function.
    """

    def __init__(self, see: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()
        self.parameters: dict[int, nn.Parameter] = {}
        self._see = see

    @contextmanager
    def apart(self) -> Iterator[dict[int, nn.Parameter]]:
        """Gives those that are seen while the context is open; they are noted here too."""
        before, self.parameters = self.parameters, {}
        try:
            yield self.parameters
        finally:
            self.parameters = before | self.parameters

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_metadata(func):
            tensors = list(_tensors_in((args, kwargs)))
            if not any(isinstance(tensor, Tracked) for tensor in tensors):
                self._see(tensors)
                self.parameters |= {id(tensor): tensor for tensor in tensors if isinstance(tensor, nn.Parameter)}
        return func(*args, **kwargs)


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Of the arguments of a function of torch, which takes no containers but these."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list, dict)):
            yield from _tensors_in(value)


class ShapesFromValues(TorchDispatchMode):  # type: ignore[misc, no-untyped-call]
    """Notices operators whose result has a shape that depends on values of tracked tensors."""

    def __init__(self, leaves: list[Any], function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False
        # where a mask selects, its values decide, not those of what is selected from
        deciding = (
            leaves[1:] if getattr(function, "__name__", "") in ("__getitem__", "masked_select", "index") else leaves
        )
        self._may_decide = any(
            is_value(leaf) and (deciding is leaves or leaf.dtype in (torch.bool, torch.uint8)) for leaf in deciding
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._may_decide and torch.Tag.dynamic_output_shape in getattr(func, "tags", ()):
            indices = args[1] if "index" in str(func) and len(args) > 1 else ()
            is_plain_index = "index" in str(func) and not any(
                isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices or ()
            )
            self.found = self.found or not is_plain_index
        return func(*args, **(kwargs or {}))


@contextmanager
def functions_followed(run: Run) -> Iterator[None]:
    """Let a run follow `torch.autograd.Function`s of the user, which are no functions of torch."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        current = current_run()
        call = AppliedFunction(cls, original)
        if current is None or not any(isinstance(leaf, Tracked) for leaf in tree_leaves((args, kwargs))):
            return call(*args, **kwargs)
        return current.operation(call, args, kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]


@dataclass(frozen=True)
class AppliedFunction:
    """An `autograd.Function` of the user as a function of torch.

    Attributes:
        cls: The function.
        original: torch's own `apply`, as it stands in the class.
    """

    cls: Any
    original: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.original.__get__(None, self.cls)(*args, **kwargs)


def users_line() -> str:
    """The innermost line of the stack that is neither torch's nor this package's."""
    own, torchs = str(Path(__file__).parents[3]), str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((own, torchs, "<")) and "contextlib" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"


def is_value(leaf: Any) -> bool:
    """Whether something is a tracked tensor that the trace knows."""
    return isinstance(leaf, Tracked) and leaf.label >= 0
