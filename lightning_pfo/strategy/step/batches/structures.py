"""What batches and outputs are made of: containers, which are taken apart and put together, and samples in a row."""

from __future__ import annotations

import copy
import sys
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.model.tracing.forms.parts import attributes_of, found_in, leads_back

PLAIN: frozenset[type] = frozenset({str, bytes, int, float, complex, bool, type(None)})
"""Types of single values; lists may have thousands of them, so they are looked for first."""
_LEAVES = PLAIN | {torch.Tensor, np.ndarray}
_CONTAINERS = frozenset({list, tuple, dict})
"""What most batches are made of; all of it is told by its type at once."""

# ---- containers ----


class Parts(NamedTuple):
    """A container taken apart.

    Attributes:
        names: How each part is written after the container, such as `['x']`, `[0]` and `.x`.
        values: The parts.
        rebuild: Makes a container of the same type from other parts in this order; this one stays as it is.
    """

    names: list[str]
    values: list[Any]
    rebuild: Callable[[Sequence[Any]], Any]


def parts_of(value: Any, *, objects: bool = False) -> Parts | None:
    """Take a container apart: mappings, lists, tuples, named tuples, dataclasses and attrs classes.

    Args:
        value: What may be a container.
        objects: Whether other objects are containers of their attributes.

    Returns:
        Its parts; None if it is no container.
    """
    if type(value) is list or type(value) is tuple:  # most are
        return _parts_of_row(value)
    if isinstance(value, Mapping):
        return _parts_of_mapping(value)
    if isinstance(value, torch.Size):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Parts(
            [f".{name}" for name in value._fields], list(value), lambda parts: tuple.__new__(type(value), parts)
        )
    if isinstance(value, (list, tuple)):
        return _parts_of_row(value)
    names = _attributes_of(value, objects=objects)
    if not names:
        return None
    return Parts(
        [f".{name}" for name in names],
        [getattr(value, name) for name in names],
        lambda parts: _with_attributes(value, dict(zip(names, parts, strict=True))),
    )


def taken_apart(value: Any) -> Parts | None:
    """The same, where objects that hold tensors are containers of their attributes too; see `holds_tensors`."""
    parts = parts_of(value)
    return parts_of(value, objects=True) if parts is None and holds_tensors(value) else parts


def _attributes_of(value: Any, *, objects: bool) -> list[str]:
    """Names of fields first, then those of what is not a field."""
    if isinstance(value, (type, nn.Module, torch.Tensor, np.ndarray)):
        return []
    declared: list[str] = []
    if is_dataclass(value):
        declared = [field.name for field in fields(value)]
    elif hasattr(type(value), "__attrs_attrs__"):
        declared = [attribute.name for attribute in type(value).__attrs_attrs__]
    elif not objects or callable(value):
        return []
    own = attributes_of(value)
    return [name for name in dict.fromkeys([*declared, *own]) if name in own or hasattr(value, name)]


def _with_attributes(value: Any, attributes: Mapping[str, Any]) -> Any:
    """A copy with other attributes, without the `__init__` and `__setattr__` of its class: it may be frozen."""
    changed = copy.copy(value)
    for name, attribute in attributes.items():
        object.__setattr__(changed, name, attribute)
    return changed


def _parts_of_row(value: list[Any] | tuple[Any, ...]) -> Parts:
    names = [f"[{index}]" for index in range(len(value))]
    return Parts(names, list(value), lambda parts: parts if type(value) is list else type(value)(parts))


def _parts_of_mapping(value: Mapping[Any, Any]) -> Parts:
    keys = list(value.keys())  # a TensorDict without dimensions cannot be iterated over
    # What such a dict keeps beside its items, as transformers' BatchEncoding its `encodings`, belongs to samples too.
    own: dict[str, Any] = getattr(value, "__dict__", {}) if isinstance(value, (dict, UserDict)) else {}
    extra = [name for name in own if name not in keys and not (isinstance(value, UserDict) and name == "data")]

    def rebuild(parts: Sequence[Any]) -> Any:
        items = dict(zip(keys, parts[: len(keys)], strict=True))
        if type(value) is dict:
            return items
        if not isinstance(value, (dict, UserDict)):  # a copy of it could share its items
            try:
                return type(value)(items)  # type: ignore[call-arg]
            except Exception as error:
                raise BatchError(
                    f"A mapping other than a dict is made anew from its items, by {type(value).__name__}(dict); that "
                    f"raised {type(error).__name__}: {error}. Use a dict, or split batches with split_batch=."
                ) from error
        changed = copy.copy(value)
        attributes = dict(zip(extra, parts[len(keys) :], strict=True))
        for key, item in items.items():
            changed[key] = item
            if key in own:  # items that are attributes as well
                attributes[key] = item
        for name, attribute in attributes.items():
            object.__setattr__(changed, name, attribute)
        return changed

    names = [*(f"[{key!r}]" for key in keys), *(f".{name}" for name in extra)]
    return Parts(names, [*(value[key] for key in keys), *(own[name] for name in extra)], rebuild)


def leaves_of(value: Any, path: str = "batch", _around: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    """All that is no container in `value`, each with the path to it, such as `batch['x'][0]`.

    Attributes of objects of other classes count too, where there is a tensor among them.
    """
    parts = None
    if type(value) not in _LEAVES and not has_samples(value) and id(value) not in _around:
        parts = taken_apart(value)
    if parts is None:
        yield path, value
        return
    around = _around | {id(value)}
    for name, part in zip(parts.names, parts.values, strict=True):
        if type(part) in _LEAVES:
            yield path + name, part
        else:
            yield from leaves_of(part, path + name, around)


def holds_tensors(value: Any) -> bool:
    """Whether an object that is no ordinary container has tensors, however deep, and is taken apart for them.

    One that leads back to itself is so only for those that it has as attributes, or in containers that are attributes.
    """
    if type(value) in PLAIN or parts_of(value) is not None:
        return False
    parts = parts_of(value, objects=True)
    if parts is None:
        return False
    if any(_has_tensor(part, frozenset({id(value)})) for part in parts.values):
        return True
    return next(found_in(value, has_samples), None) is not None and not leads_back(value)


def _has_tensor(value: Any, around: frozenset[int]) -> bool:
    if type(value) in PLAIN or id(value) in around:
        return False
    if has_samples(value):
        return True
    parts = parts_of(value)
    return parts is not None and any(_has_tensor(part, around | {id(value)}) for part in parts.values)


# ---- samples in a row ----


def has_samples(value: Any) -> bool:
    """Whether a value is known to hold samples in a row, or is a single number, in the form of a tensor or array.

    Tensors of all kinds, numpy arrays, packed sequences, TensorDicts, tables, batches of PyTorch Geometric.
    """
    if type(value) in _CONTAINERS:
        return False
    if isinstance(value, (torch.Tensor, np.ndarray, PackedSequence)):
        return True
    return _is_tensor_dict(value) or _is_graphs(value) or _is_table(value)


def num_samples(value: Any, batch_dim: int = 0) -> int | None:
    """How many samples `value`, of which `has_samples` is true, holds; None if it has no dimension."""
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if _is_graphs(value):
        return int(value.num_graphs)
    if _is_table(value):
        return len(value)
    if isinstance(value, torch.Tensor) and value.is_nested:
        return int(value.size(0))
    shape = value.batch_size if _is_tensor_dict(value) else value.shape
    return int(shape[_dim(len(shape), batch_dim)]) if len(shape) else None


def take_samples(value: Any, start: int, stop: int, batch_dim: int = 0) -> Any:
    """Some samples of what `has_samples`: a view where there are views."""
    if type(value) is torch.Tensor and value.layout == torch.strided and not value.is_nested:  # most are
        return _like(value.narrow(_dim(value.dim(), batch_dim), start, stop - start), value)
    if isinstance(value, PackedSequence):
        return pack_sequence(unpack_sequence(value)[start:stop], enforce_sorted=False)
    if _is_graphs(value):
        return type(value).from_data_list(value.to_data_list()[start:stop])
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            return torch.nested.as_nested_tensor(list(value.unbind()[start:stop]), layout=value.layout)
        if value.layout != torch.strided:
            return _take_from_sparse(value, start, stop, _dim(value.dim(), batch_dim))
    if _is_table(value):
        return value.iloc[start:stop]
    ndim = len(value.batch_size) if _is_tensor_dict(value) else value.ndim
    taken = value[(*[slice(None)] * _dim(ndim, batch_dim), slice(start, stop))]
    return _like(taken, value) if isinstance(value, torch.Tensor) else taken


def join_samples(values: Sequence[Any], batch_dim: int = 0) -> Any:
    """The samples of all `values`, which are of one kind."""
    first = values[0]
    if isinstance(first, PackedSequence):
        return pack_sequence([one for value in values for one in unpack_sequence(value)], enforce_sorted=False)
    if _is_graphs(first):
        return type(first).from_data_list([graph for value in values for graph in value.to_data_list()])
    if _is_table(first):
        # a table made of a microbatch counts its rows from 0, as that of a batch does
        anew = all(list(value.index) == list(range(len(value))) for value in values)
        return sys.modules["pandas"].concat(list(values), ignore_index=anew)
    if isinstance(first, np.ndarray):
        return np.concatenate(values, axis=_dim(first.ndim, batch_dim))
    if isinstance(first, torch.Tensor) and first.is_nested:
        return torch.nested.as_nested_tensor([one for value in values for one in value.unbind()], layout=first.layout)
    ndim = len(first.batch_size) if _is_tensor_dict(first) else first.dim()
    return torch.cat(list(values), dim=_dim(ndim, batch_dim))


def _dim(ndim: int, batch_dim: int) -> int:
    """What has fewer dimensions, such as labels beside sequences that have time first, has samples along its last."""
    return min(ndim - 1, batch_dim)


def _take_from_sparse(value: torch.Tensor, start: int, stop: int, dim: int) -> torch.Tensor:
    taken = torch.narrow_copy(value.to_sparse(), dim, start, stop - start)
    return taken if value.layout == torch.sparse_coo else taken.to_sparse(layout=value.layout)


def _like(taken: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a slice the class and attributes that `value` has, such as the format of torchvision's bounding boxes."""
    if type(value) in (torch.Tensor, nn.Parameter):
        # a step that changes its microbatch in place does not change what the backward of another needs
        return taken if taken.requires_grad else taken.data
    if type(taken) is torch.Tensor:
        taken = taken.as_subclass(type(value))
    for name, attribute in vars(value).items():
        if name not in vars(taken):
            setattr(taken, name, attribute)
    return taken


def _is_tensor_dict(value: Any) -> bool:
    """TensorDict and tensorclass: they say how many of their dimensions are those of a batch."""
    shape = getattr(value, "batch_size", None) if hasattr(type(value), "__getitem__") else None
    return isinstance(shape, torch.Size) and len(shape) > 0


def _is_graphs(value: Any) -> bool:
    """Batches of PyTorch Geometric: one large graph, which they take apart and put together."""
    return hasattr(type(value), "from_data_list") and hasattr(value, "to_data_list") and hasattr(value, "num_graphs")


def _is_table(value: Any) -> bool:
    """Tables and columns of pandas, which is not imported here."""
    return hasattr(type(value), "iloc")
