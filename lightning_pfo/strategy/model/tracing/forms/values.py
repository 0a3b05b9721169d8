"""Values that stand for those of other stages: zeros, and other numbers where something fails on zeros; or forms only.

Small buffers have their own, as sizes and masks that layers keep: those that they had when the model was divided, which
are known on all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import unwarned
from lightning_pfo.strategy.compat.tensors import (
    DisableTorchFunctionSubclass,
    FakeTensorMode,
    WithoutValues,
    form_without_values,
)
from lightning_pfo.strategy.model.tracing.tracked import natively, plain
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_map_only, tree_unflatten
from lightning_pfo.strategy.parallel.dtensor import writes

MOST_LOOKS = 4_000
"""So often Python may look at values in a trace: a loop that waits for those of stages has no end on others."""

_LOOKS: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.Tensor.item,
        torch.Tensor.tolist,
        torch.Tensor.__bool__,
        torch.Tensor.__float__,
        torch.Tensor.__int__,
        torch.Tensor.__index__,
        torch.equal,
        torch.allclose,
    }
)


_MOST_REMEMBERED = 1024
"""Elements of a buffer."""
_buffers: WeakKeyDictionary[nn.Module, dict[str, torch.Tensor]] = WeakKeyDictionary()


def remember_buffers(model: nn.Module) -> None:
    """Keep the values of small buffers, as long as all are here."""
    for module in model.modules():
        named = module.named_buffers(recurse=False)
        small = {name: buffer.detach() for name, buffer in named if buffer.numel() <= _MOST_REMEMBERED}
        if small and not any(buffer.is_meta for buffer in small.values()):
            _buffers[module] = {name: buffer.to("cpu", copy=True) for name, buffer in small.items()}


def remembered_buffer(module: nn.Module, name: str, device: torch.device) -> torch.Tensor | None:
    """A copy of what a buffer had then, if it is known."""
    known = _buffers.get(module, {}).get(name)
    return None if known is None else known.to(device, copy=True)


def zeros_of(form: torch.Tensor) -> torch.Tensor:
    """Zeros in a form; where gradients flow, no leaf of autograd's graph, so that it may be changed in place."""
    with torch.autocast(form.device.type, enabled=False):
        with DisableTorchFunctionSubclass():  # Python's question, not the user's
            shape, needs_grad = form.shape, form.requires_grad and torch.is_grad_enabled()
        make, strides = partial(zeros, dtype=form.dtype, device=form.device), strides_of(form)
        if not needs_grad:
            return make(shape, strides)
        zero = make((), requires_grad=True)
        return zero.expand(shape).clone() if strides is None else make(shape, strides) + zero


def zeros(
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool = False,
) -> torch.Tensor:
    """As `torch.zeros`; with strides it lies in memory accordingly."""
    if strides is None:
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=requires_grad)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_().requires_grad_(requires_grad)


def strides_of(form: torch.Tensor) -> tuple[int, ...] | None:
    """How a tensor lies in memory, by which `contiguous` and `view` decide; None: as a new one does.

    One whose elements share memory, or have gaps between them, is taken for what a copy of it would be.
    """
    with DisableTorchFunctionSubclass():
        if form.layout != torch.strided or form.is_contiguous():
            return None
        copy = torch.empty_like(torch.empty_strided(form.shape, form.stride(), device="meta"))
        return None if copy.is_contiguous() else copy.stride()


def fill_rising(tensor: torch.Tensor) -> torch.Tensor:
    """Let zeros be positive, and no two of them alike: steps divide by what they read, or ask whether it is there."""
    with torch.no_grad(), DisableTorchFunctionSubclass():
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            numbers = torch.linspace(1, 2, tensor.numel(), device=tensor.device)
            tensor.copy_(numbers.reshape(tensor.shape))
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
    return tensor


def rising(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of such numbers for one of zeros; others have values of the batch."""
    with DisableTorchFunctionSubclass():
        is_zero = tensor.layout == torch.strided and not tensor.any()
        return fill_rising(tensor.clone()) if is_zero else tensor


@cache
def mode_without_values() -> FakeTensorMode:
    """One for all."""
    return WithoutValues(allow_non_fake_inputs=True)


@contextmanager
def without_reports() -> Iterator[None]:
    """Torch writes tracebacks of operators that do not run without values, or warns of them; we try another way."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True  # a level would clear the caches of all loggers
    try:
        with unwarned("Accessing the data pointer of FakeTensor"):
            yield
    finally:
        logger.disabled = before


def form_of(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without values in the form of another; ten times faster than the general way."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided:
        return mode.from_tensor(tensor)
    form = form_without_values(
        mode,
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
    )
    if tensor.is_leaf:
        return form
    with mode, torch.enable_grad():
        return form.clone()  # leaves of autograd's graph cannot be changed in place


def on_zeros(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a function of torch returns of zeros; of such as it does not take, zeros in the form of that.

    A matrix of zeros has no inverse, and no number is drawn where all have a probability of zero.
    """
    try:
        return natively(function, args, kwargs)
    except (RuntimeError, IndexError):
        if writes(function, kwargs):
            raise
        mode = mode_without_values()
        leaves, structure = tree_flatten(plain((args, kwargs)))
        try:
            forms = [form_of(mode, leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(forms, structure)
            with without_reports(), DisableTorchFunctionSubclass(), mode:
                found = function(*args, **kwargs)
        except Exception:
            found = None
        if found is None:
            raise
        return tree_map_only(torch.Tensor, zeros_of, found)


class LooksBounded(TorchFunctionMode):
    """Ends what looks at values too often.

    Raises:
        ConfigurationError: If it does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            self._number += 1
            check_looks(self._number, lambda: "in the forward of a layer")
        return func(*args, **(kwargs or {}))


def check_looks(number: int, where: Callable[[], str]) -> None:
    """Check how often Python has looked at values.

    Args:
        number: So often.
        where: Says where it did so last.

    Raises:
        ConfigurationError: If that is too often.
    """
    if number > MOST_LOOKS:
        raise ConfigurationError(
            f"A step that looks at values of layers {MOST_LOOKS:,} times, as a loop that waits for them, cannot be "
            f"traced without them. Last it does so {where()}. Let a number that the batch decides end the loop."
        )
