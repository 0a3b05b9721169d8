"""Tensors of torch: their versions and memory, those without values, and trees of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten
from torch.utils.flop_counter import flop_registry

__all__ = [
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "WithoutValues",
    "flop_registry",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

PRIVATE = {
    "torch.utils._pytree": (
        "Batches, outputs and arguments of any form could not be taken apart and put together; torch has no public "
        "module for it."
    ),
    "torch.utils._python_dispatch.TorchDispatchMode": (
        "The bytes of an instruction could not be counted. The documentation names it, under this path."
    ),
    "torch.utils.flop_counter.flop_registry": (
        "The operations of an instruction could not be counted; `FlopCounterMode`, which is public, hooks into modules."
    ),
    "torch._subclasses.fake_tensor.FakeTensorMode": (
        "What a module returns could only be found by computing it, with the memory that this takes. Its property "
        "`avoid_device_init`, where there is one, is asked once."
    ),
    "torch._subclasses.fake_tensor.FakeTensor": (
        "Tensors without values could not be told from others, nor could the memory that they stand for be counted."
    ),
    "torch._C.DisableTorchFunctionSubclass": (
        "The values of tensors that are followed could not be computed with: each function would be followed again. "
        "The documentation names it, under this path."
    ),
    "torch.Tensor._make_wrapper_subclass": (
        "What another stage computes could not stand in a step as a tensor of its shape, dtype and device that has no "
        "memory. torch's own documentation of subclasses uses it."
    ),
    "torch._is_all_true": (
        "That distributions check their values (`validate_args`) would be taken for control flow: they would be sent, "
        "and stages could not be called again after it."
    ),
    "torch.Tensor._base": "What a tensor is a view of would not change with it on later stages.",
    "torch.Tensor._version": "Changes in place would be missed, and a later stage would get the value from before.",
    "torch.autograd._unsafe_preserve_version_counter": (
        "A weight that the step writes into would fail in the backward of a microbatch when another one has done the "
        "same; each finds it as it was before, with that version."
    ),
    "torch.UntypedStorage._cdata": (
        "Two values that share memory, one of which is changed later, would be sent without a word; `data_ptr` is the "
        "same for all that is empty."
    ),
    "torch.distributed.tensor.DTensor._local_tensor": (
        "In-place changes of gradients and sums over their parts; `to_local` returns a view that autograd follows."
    ),
    "torch.ops.aten._local_scalar_dense": (
        "An optimizer, or a step, that looks at a value could not be tried with tensors that have none."
    ),
}
"""Private names, and what they are needed for."""

READS_VALUE = torch.ops.aten._local_scalar_dense.default
"""The operator by which Python gets the value of a tensor."""

TensorT = TypeVar("TensorT", bound=torch.Tensor)


class WithoutValues(FakeTensorMode):  # type: ignore[no-untyped-call]
    """The mode in which tensors have no values; one for all, as making one takes as long as running a small layer."""

    @cached_property
    def avoid_device_init(self) -> bool:  # type: ignore[override]
        """Whether there is no accelerator: torch asks at each operation, and a CUDA build without a GPU looks anew."""
        return super().avoid_device_init


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor, or a view of it, has been changed in place; those of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def change_mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Another one after a change in place, or of `data`."""
    return version_of(tensor), memory_of(tensor)


def version_restorer(tensor: torch.Tensor) -> Callable[[], None]:
    """What sets the version of a tensor back to that of now, for who gives it back the values of now."""
    keeper = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return lambda: keeper.__exit__()


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with its numbers in memory: those of `x.conj()` are conjugated as they are read."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors share that share memory; one of its own for a tensor without, as inside of `vmap`."""
    if isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    try:
        number: int = tensor.untyped_storage()._cdata
    except NotImplementedError:
        return -id(tensor)
    return number


def reserved_memory(tensor: torch.Tensor) -> object:
    """What keeps the number of a tensor's memory its own as long as it is held, though the memory itself may go."""
    try:
        return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except NotImplementedError:
        return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own or shares that of others; sparse ones and most wrappers have none."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) or isinstance(tensor, DTensor)
    return tensor.layout == torch.strided and not tensor.is_meta and is_plain


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a tensor is a view of; None if it is none."""
    return tensor._base


CHECKS = frozenset({torch._is_all_true, torch.Tensor._is_all_true})
"""Functions whose answer is looked at only to raise an error where it is not True."""


def without_memory(cls: type[TensorT], form: torch.Tensor) -> TensorT:
    """A tensor of a subclass in the form of another, without memory."""
    return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
        cls,
        form.shape,
        strides=form.stride(),
        dtype=form.dtype,
        device=form.device,
        requires_grad=form.requires_grad,
    )


def form_without_values(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
    *,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
) -> torch.Tensor:
    """A tensor without values, for where the mode is; it takes an eighth of the time that functions of torch do there.

    Args:
        mode: The mode, which must not be entered.
        shape: Its shape.
        stride: Its strides; None: it is contiguous.
        dtype: Its dtype.
        device: Where it says that it lies.
        requires_grad: Whether it is a leaf that needs gradients.
    """
    make = partial(torch.empty, shape) if stride is None else partial(torch.empty_strided, shape, stride)
    return FakeTensor(mode, make(dtype=dtype, device="meta", requires_grad=requires_grad), device)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This process's part, sharing memory with `tensor`, unseen by autograd."""
    return tensor._local_tensor
