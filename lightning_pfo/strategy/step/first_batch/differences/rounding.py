"""What rounding explains of a difference between losses: that follows from how precisely they are computed.

Measured on CPUs in fp32 over a hundred small models and a Llama with a vocabulary of 32,000 and large logits, rounding
changes a loss by 2e-7 of it at most. What couples samples, as losses that balance the load of experts, may change it by
1e-4 only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.step.batches.structures import leaves_of

_DOUBLE = 1e-10
_SINGLE = 1e-5  # it sums in another order, with other kernels for another size
_ROUNDED_PRODUCTS = 1e-3  # of TF32
_NARROWER = 2  # rounding errors of a narrower type, which do not add up over the samples of a mean
_TAKES_ONE = ("__getitem__", "select", "as_strided")  # of many numbers one, which shares their memory
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def tolerance_of(dtypes: Iterable[torch.dtype], *, rounds_products: bool = False) -> float:
    """The relative difference that rounding explains, where losses are computed in these types.

    Args:
        dtypes: The types; the narrowest decides.
        rounds_products: Whether products in fp32 are rounded to fewer bits.
    """
    single = _ROUNDED_PRODUCTS if rounds_products else _SINGLE
    return max((_tolerance(dtype, single) for dtype in dtypes if _has_fractions(dtype)), default=single)


def rounds_products(module: nn.Module, device: torch.device) -> bool:
    """Whether torch may round products of a module in fp32 to fewer bits."""
    if _is_so(lambda: torch.get_float32_matmul_precision() != "highest"):
        return True
    if device.type != "cuda" or not _is_so(lambda: torch.backends.cudnn.allow_tf32):
        return False
    return any(isinstance(part, (*_CONVOLUTIONS, nn.RNNBase)) for part in module.modules())


@contextmanager
def types_noted(dtypes: set[torch.dtype]) -> Iterator[None]:
    """Note the types of what modules return meanwhile: narrower ones than those of parameters come of autocast."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # what is compiled now would go on to note
            return
        for each in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(each, torch.Tensor):
                dtypes.add(each.dtype)

    with register_module_forward_hook(note):
        yield


class WideNumbers(TorchFunctionMode):
    """Where what an operation makes one number of in a narrower type than fp32, as a mean of losses, is made in fp32.

    Rounding of such a number hides what it is a mean over: of bf16, 0.4 % of it.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (isinstance(result, torch.Tensor) and is_narrow(result.dtype) and not result.dim()):
            return result
        given = [each for _, each in leaves_of((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_of_many = any(is_narrow(each.dtype) and each.shape.numel() > 1 for each in given)
        if not is_of_many or any(each is result for each in given) or getattr(func, "__name__", "") in _TAKES_ONE:
            return result
        return func(*tree_map_only(torch.Tensor, _wide, args), **tree_map_only(torch.Tensor, _wide, kwargs))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if is_narrow(tensor.dtype) else tensor


def is_narrow(dtype: torch.dtype) -> bool:
    """Whether a type has fewer bits than fp32."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def _tolerance(dtype: torch.dtype, single: float) -> float:
    eps = torch.finfo(dtype).eps
    if eps < torch.finfo(torch.float32).eps:
        return _DOUBLE
    return single if eps == torch.finfo(torch.float32).eps else max(_ROUNDED_PRODUCTS, _NARROWER * eps)


def _has_fractions(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _is_so(asked: Callable[[], bool]) -> bool:
    """What torch says of its precision; it may be so where it was set in a new way of torch, and does not say."""
    try:
        return asked()
    except RuntimeError:
        return True
