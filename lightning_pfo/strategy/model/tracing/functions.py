"""Functions of torch that need no value of a tensor, or change no value; and functions of users that are compiled.

What these do between units is followed, so they run uncompiled: else the compiler would look into what follows them.
Inside of units everything runs as ever.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu"),
    *("is_meta", "is_sparse", "is_quantized", "is_mps", "is_xpu", "is_nested", "is_mkldnn", "itemsize"),
    *("nbytes", "names", "output_nr", "_version", "_base", "name", "is_sparse_csr", "retains_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size"),
    *("is_floating_point", "is_complex", "is_signed", "is_contiguous", "get_device", "is_pinned"),
    *("is_inference", "is_conj", "is_neg", "__len__", "__hash__", "_is_view", "is_shared", "dim_order"),
    *("has_names", "is_same_size", "__dir__", "__reduce_ex__", "is_distributed"),
)
_FUNCTIONS = [
    "is_floating_point",
    "is_complex",
    "numel",
    "is_conj",
    "is_neg",
    "is_inference",
    "is_same_size",
    "result_type",
    "get_device",
]


def _metadata() -> frozenset[Any]:
    found: set[Any] = set()
    for name in _PROPERTIES:
        found.add(getattr(getattr(torch.Tensor, name, None), "__get__", None))
    for name in _METHODS:
        found.add(getattr(torch.Tensor, name, None))
    for name in _FUNCTIONS:
        found.add(getattr(torch, name, None))
    return frozenset(found - {None})


METADATA = _metadata()
"""Functions that tell the form of a tensor."""

MAKERS = frozenset(
    function
    for name in ("zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_full", "new_empty")
    for owner in (torch, torch.Tensor)
    if (function := getattr(owner, name, None)) is not None
)
"""Functions that make tensors in the form of others, without looking at values."""

_PLACES = ("device", "is_meta", "is_cuda", "is_cpu", "is_mps", "is_xpu")
_TELL_PLACE = frozenset(
    {*(getattr(torch.Tensor, name).__get__ for name in _PLACES), torch.Tensor.get_device, torch.get_device}
)
_LIKE_ANOTHER = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "type_as", "expand_as", "view_as", "reshape_as")
)
"""Functions that give a tensor the form of their second argument."""

_RANDOM = frozenset(
    function
    for name in (
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
        *("bernoulli", "multinomial", "poisson", "normal", "rand_like", "randn_like", "randint_like"),
        "kaiming_uniform_",
    )
    for owner in (torch, torch.Tensor, torch.nn.init)
    if (function := getattr(owner, name, None)) is not None
)

HOOKS = frozenset(
    function
    for name in ("register_hook", "retain_grad", "register_post_accumulate_grad_hook")
    if (function := getattr(torch.Tensor, name, None)) is not None
)
"""Functions that only leave something with a tensor."""

_SWITCH_GRADIENTS = frozenset({torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__})  # type: ignore[attr-defined]
_SWITCHES = _SWITCH_GRADIENTS | HOOKS


def switches_gradients(function: Any) -> bool:
    """Whether a function says of a tensor if it has gradients."""
    return _is_in(_SWITCH_GRADIENTS, function)


def tells_place(function: Any) -> bool:
    """Whether a function tells where a tensor lies."""
    return _is_in(_TELL_PLACE, function)


def draws(function: Any) -> bool:
    """Whether a function draws as many random numbers as a tensor has elements."""
    return _is_in(_RANDOM, function)


def form_argument(function: Any) -> int | None:
    """The position of the argument of a function that is only asked for its form, if it has one."""
    return 0 if _is_in(MAKERS, function) else 1 if _is_in(_LIKE_ANOTHER, function) else None


def whose_values_count(function: Any, args: tuple[Any, ...], leaves: Iterable[Any]) -> list[Any]:
    """The leaves of the arguments of a function without that which is only asked for its form, or switched."""
    if _is_in(_SWITCHES, function):
        return []
    index = form_argument(function)
    if index is None or len(args) <= index:
        return list(leaves)
    return [leaf for leaf in leaves if leaf is not args[index] or any(leaf is each for each in args[:index])]


def is_metadata(function: Any) -> bool:
    """Whether a function only tells the form of a tensor."""
    return _is_in(METADATA, function)


def tells_no_values(function: Any) -> bool:
    """Whether a function only tells the form of a tensor, or, as we ask ourselves, which memory it has."""
    return is_metadata(function) or function == torch.Tensor.untyped_storage


def _is_in(functions: frozenset[Any], function: Any) -> bool:
    try:
        return function in functions
    except TypeError:  # unhashable
        return False


# ---- compiled functions ----

_COMPILER = "torch._dynamo"
_WRAPPER = "compile_wrapper"


class Uncompiled:
    """A context in which compiled functions run as they are written, but in pauses."""

    def __init__(self) -> None:
        self._stance: Any = None

    def __enter__(self) -> Uncompiled:
        if _COMPILER in sys.modules:  # else nothing is compiled, and to import it takes seconds
            self._stance = torch.compiler.set_stance("force_eager")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._stance is not None:
            self._stance.__exit__(kind, error, where)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let functions run compiled while the context is open."""
        if self._stance is None:
            yield
            return
        self._stance.__exit__(None, None, None)
        try:
            yield
        finally:
            self._stance.__enter__()


def is_in_compiled_function() -> bool:
    """Whether a compiled function has been called, and has not returned."""
    frame = inspect.currentframe() if _COMPILER in sys.modules else None
    while frame is not None:
        if frame.f_code.co_name == _WRAPPER and frame.f_globals.get("__name__", "").startswith(_COMPILER):
            return True
        frame = frame.f_back
    return False
