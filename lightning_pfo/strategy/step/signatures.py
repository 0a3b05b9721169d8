"""The form of a microbatch, under which it is remembered what stages do of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_pfo.strategy.model.tracing.forms.parts import found_in
from lightning_pfo.strategy.step.batches.structures import PLAIN, has_samples, leaves_of


def signature_of(microbatch: Any) -> Any:
    """The form of a microbatch: shapes, types, whether gradients are wanted, and values that may decide what runs.

    Everything with a shape counts, however deep in objects it is: tensors of all kinds with the lengths of what they
    hold, arrays, tables and images.
    """
    return type(microbatch).__name__, *((path, _form_of(leaf)) for path, leaf in leaves_of(microbatch))


def _form_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _form_of_tensor(leaf)
    if isinstance(leaf, (bool, type(None))):
        return leaf
    kind = type(leaf).__name__
    return kind if type(leaf) in PLAIN else (kind, *map(_form_of_samples, found_in(leaf, _has_shape)))


def _form_of_samples(value: Any) -> Any:
    """The form of what has a shape, of which there may be any number in an object that nobody takes apart."""
    if isinstance(value, torch.Tensor):
        return _form_of_tensor(value)
    if isinstance(value, PackedSequence):
        return (*_form_of_tensor(value.data), *_lengths_of(value), value.sorted_indices is None)
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    if _is_image(value):
        return value.size, value.mode
    if hasattr(type(value), "iloc"):  # a table or a column of pandas
        return value.shape, tuple(getattr(value, "columns", ())), str(value.dtypes)
    return signature_of(value.to_dict()) if hasattr(value, "to_dict") else value.batch_size


def _form_of_tensor(tensor: torch.Tensor) -> Any:
    return (*_sizes_of(tensor), tensor.dtype, tensor.requires_grad)


def _sizes_of(tensor: torch.Tensor) -> Iterator[Any]:
    if tensor.is_nested:  # the size of a jagged one is equal to that of no other
        yield from (row.shape for row in tensor.unbind())
    else:
        yield tensor.shape
    if tensor.layout != torch.strided:
        yield tensor.layout
        if not tensor.is_nested:
            yield (tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor).values().shape


def _lengths_of(sequences: PackedSequence) -> list[int]:
    """The length of each, in the order of the samples."""
    places = torch.arange(int(sequences.batch_sizes[0]))
    lengths = (sequences.batch_sizes[:, None] > places).sum(0)
    order = sequences.unsorted_indices
    return (lengths if order is None else lengths[order.cpu()]).tolist()


def _has_shape(value: Any) -> bool:
    return has_samples(value) or _is_image(value)


def _is_image(value: Any) -> bool:
    """Images of PIL, which is not imported here."""
    return isinstance(getattr(value, "mode", None), str) and isinstance(getattr(value, "size", None), tuple)
