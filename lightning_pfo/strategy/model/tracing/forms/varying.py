"""Sizes that depend on the values of tensors, as after `nonzero`: which dimensions of what is computed have them.

In a trace such a size is one of many (see `selecting`). Each operation on such tensors is asked once more, without
computing, with other sizes: what changes in the form of its results depends on them. Sizes that Python is told remember
where they come from, so that whatever takes them needs those tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from lightning_pfo.strategy.model.tracing.forms.selecting import Selected, Selecting
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following, natively
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_unflatten

_OTHER = 7
"""By so much sizes are larger when an operation is asked once more."""

_ARITHMETIC = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv"),
    *("mod", "rmod", "pow", "rpow", "neg", "pos", "abs", "round"),
)
_DECIDING = ("eq", "ne", "lt", "le", "gt", "ge", "bool", "int", "float", "index", "hash", "trunc", "floor", "ceil")


@contextmanager
def warnings_unheard() -> Iterator[None]:
    """Let nobody hear warnings: no run of the step has these sizes. What is warned of once is so later, too."""
    shown, warnings.showwarning = warnings.showwarning, lambda *args, **kwargs: None
    try:
        yield
    finally:
        warnings.showwarning = shown


class _Number:
    """A number that has been computed from sizes of tensors.

    Attributes:
        other: What it would be if these sizes were larger.
        labels: The numbers of the tensors.
        decides: Is told if Python looks at it.
    """

    other: Any
    labels: frozenset[int]
    decides: Callable[[frozenset[int]], None]


def _operator(kind: type, name: str, *, decides: bool) -> Callable[..., Any]:
    original = getattr(kind, name, None)

    def call(self: Any, *others: Any) -> Any:
        if original is None:
            return NotImplemented
        result = original(self, *map(_plain, others))
        if decides:
            self.decides(self.labels)
            return result
        if result is NotImplemented:
            return result
        labels = self.labels.union(*(each.labels for each in others if isinstance(each, _Number)))
        try:
            other = getattr(type(self.other), name)(self.other, *map(other_of, others))
        except ArithmeticError:
            other = None
        return number(result, other, labels, self.decides)

    return call


def _plain(value: Any) -> Any:
    return plain_number(value) if isinstance(value, _Number) else value


def _class(kind: type) -> type:
    names = {name: False for name in _ARITHMETIC} | {name: True for name in _DECIDING}
    operators = {
        f"__{n}__": _operator(kind, f"__{n}__", decides=d) for n, d in names.items() if hasattr(kind, f"__{n}__")
    }
    return type(f"{kind.__name__.capitalize()}OfSizes", (_Number, kind), operators)


_CLASSES = {kind: _class(kind) for kind in (int, float)}


def number(value: Any, other: Any, labels: frozenset[int], decides: Callable[[frozenset[int]], None]) -> Any:
    """A number that remembers which tensors it comes from; see `_Number`."""
    if type(value) not in _CLASSES:
        return value
    made = _CLASSES[type(value)](value)
    made.other, made.labels, made.decides = other, labels, decides
    return made


def numbers_of(values: list[Any], labels: frozenset[int], decides: Callable[[frozenset[int]], None]) -> list[Any]:
    """What Python has read of tensors: numbers that remember them."""
    return [number(value, value + _OTHER, labels, decides) if type(value) in _CLASSES else value for value in values]


def plain_number(value: Any) -> Any:
    """A number without memory."""
    kind = int if isinstance(value, int) else float
    return kind.__add__(value, 0)


def other_of(value: Any) -> Any:
    """What a number, or anything else, would be if sizes were larger."""
    return value.other if isinstance(value, _Number) else value


def labels_in(leaves: Iterable[Any]) -> frozenset[int]:
    """The tensors that numbers among the leaves of arguments come from."""
    found: frozenset[int] = frozenset()
    for leaf in leaves:
        if isinstance(leaf, _Number):
            found |= leaf.labels
        elif type(leaf) in _OF_NUMBERS:
            found |= labels_in(_OF_NUMBERS[type(leaf)](leaf))
    return found


_OF_NUMBERS: dict[type, Callable[[Any], Iterable[Any]]] = {
    torch.Size: tuple,
    slice: lambda leaf: (leaf.start, leaf.stop, leaf.step),
}


def _with_numbers(leaf: Any, convert: Callable[[Any], Any]) -> Any:
    if type(leaf) not in _OF_NUMBERS:
        return convert(leaf)
    numbers = map(convert, _OF_NUMBERS[type(leaf)](leaf))
    return torch.Size(numbers) if isinstance(leaf, torch.Size) else slice(*numbers)


def without_memory_of_sizes(args: Any, kwargs: Any) -> Any:
    """Arguments with plain numbers."""
    leaves, structure = tree_flatten((args, kwargs))
    return tree_unflatten(map(_without_memory, leaves), structure)


def _without_memory(leaf: Any) -> Any:
    return _with_numbers(leaf, _plain)


ASK_SIZE = frozenset({"size", "__len__", "numel", "nelement"})
"""Functions that tell sizes as numbers."""


def told(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any, decides: Callable[[frozenset[int]], None]
) -> Any:
    """What Python is told of the form of a tensor of varying size, the first of the arguments."""
    tensor: Tracked = args[0]
    labels = frozenset({tensor.label})
    sizes = _larger_size(tensor)
    if isinstance(answer, torch.Size):
        pairs = zip(answer, sizes, strict=True)
        return torch.Size(number(a, b, labels, decides) if a != b else a for a, b in pairs)
    name = getattr(function, "__name__", "")
    if name == "__len__" and 0 in tensor.varies:  # Python takes a plain number only
        decides(labels)
    if name == "size":
        larger = sizes[kwargs.get("dim", args[-1])]
    elif name in ("numel", "nelement"):
        larger = prod(sizes)
    else:
        return answer
    return number(answer, larger, labels, decides) if larger != answer else answer


def varying_of_operation(
    function: Callable[..., Any], args: Any, kwargs: Any, found: Sequence[Any], *, from_values: bool
) -> list[frozenset[int]]:
    """The dimensions of the results of a function of torch whose size depends on values.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its named arguments.
        found: The leaves of what it returned.
        from_values: Whether it makes such a size itself.
    """
    if getattr(function, "__name__", "") == "_pad_packed_sequence":
        return _of_padded(*args)
    leaves, structure = tree_flatten((args, kwargs))

    def ask(convert: Callable[[Any], Any], selected: Selected = Selected.BY_VALUES) -> list[Any]:
        args, kwargs = tree_unflatten(map(convert, leaves), structure)
        with following(None), torch.no_grad(), Selecting(selected, by_stages=True), warnings_unheard():
            return tree_flatten(natively(function, args, kwargs))[0]

    try:
        if not from_values:
            return differing(found, ask(_larger))
        every = ask(_without_memory, Selected.ALL)
        varying = differing(every, ask(_without_memory, Selected.FEWER))
        if any(isinstance(leaf, Tracked) and leaf.varies for leaf in leaves):
            of_larger = differing(every, ask(_larger_with_values, Selected.ALL))
            varying = [one | other for one, other in zip(varying, of_larger, strict=True)]
        return varying if any(varying) else all_varying(found)
    except Exception:  # what does not run so may depend on anything
        return all_varying(found)


def _of_padded(data: Any, batch_sizes: Any, batch_first: bool, value: float, length: int) -> list[frozenset[int]]:
    """Of sequences that are padded again, and their lengths: as many as before, of the length that is asked for.

    It would not run on sizes that contradict each other.
    """
    time = frozenset({1 if batch_first else 0})
    return [time if isinstance(length, _Number) else frozenset(), frozenset()]


def larger_arguments(leaves: Iterable[Any]) -> list[Any]:
    """The leaves of the arguments of a call, of larger sizes, with tensors that have values."""
    return list(map(_larger_with_values, leaves))


def _larger_with_values(leaf: Any) -> Any:
    if isinstance(leaf, Tracked):
        return torch.zeros(_larger_size(leaf), dtype=leaf.dtype, device=leaf.device)
    return _with_numbers(leaf, other_of)


def differing(one: Sequence[Any], other: Sequence[Any]) -> list[frozenset[int]]:
    """For each of some leaves the dimensions in which it has another size than its counterpart."""
    return [_differing_dims(a, b) for a, b in zip(one, other, strict=True)]


def _differing_dims(one: Any, other: Any) -> frozenset[int]:
    if not isinstance(one, torch.Tensor):
        return frozenset()
    if one.dim() != other.dim():
        return frozenset(range(one.dim()))
    return frozenset(dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b)


def all_varying(found: Sequence[Any]) -> list[frozenset[int]]:
    """All dimensions of all results."""
    return [frozenset(range(leaf.dim())) if isinstance(leaf, torch.Tensor) else frozenset() for leaf in found]


def _larger_size(tensor: Tracked) -> list[int]:
    with following(None):  # who asks is not the step
        return [size + _OTHER if dim in tensor.varies else size for dim, size in enumerate(tensor.shape)]


def _larger(leaf: Any) -> Any:
    if isinstance(leaf, Tracked):
        return torch.empty(_larger_size(leaf), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Tensor):
        return torch.empty_like(leaf, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else _with_numbers(leaf, other_of)
