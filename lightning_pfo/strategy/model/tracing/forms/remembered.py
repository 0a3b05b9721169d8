"""Outlines of a unit's calls, remembered: a step is traced several times, mostly with what it had before."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass
from lightning_pfo.strategy.model.tracing.forms.outline import Outline, Same
from lightning_pfo.strategy.model.tracing.placeholders import kind_of
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following
from lightning_pfo.strategy.parallel.groups import content_of

_KEPT = 64
"""So many forms of calls are remembered of each unit; a form takes a few hundred bytes."""

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


_OF_UNITS: WeakKeyDictionary[Any, Outlines] = WeakKeyDictionary()


def outlines_of(unit: Any) -> Outlines:
    """Those of a unit; they go when it does."""
    return _OF_UNITS.setdefault(unit, Outlines())


@dataclass(frozen=True)
class Call:
    """A call of a module in form.

    Attributes:
        kind: The classes of the module and its parts, and the forms of their tensors.
        given: The arguments, and what holds for the whole process meanwhile.
    """

    kind: Hashable
    given: Hashable


class Outlines:
    """What a unit returned in form, by the form of what it was given.

    The layers of a model are mostly alike. One that at first returned the same as another of its kind, given the same,
    is taken to do so for batches of other lengths too; if it did not, its stage would say so when it sends.

    Attributes:
        silent: How it has been called that tells other units nothing, see `talking`, and what functions it called then.
    """

    _first_given: WeakValueDictionary[Call, Outlines] = WeakValueDictionary()

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Outline] = OrderedDict()
        self.silent: dict[Hashable, int] = {}
        self._values_decide = False
        self._like: Outlines | None = None

    def find(self, call: Call | None, leaves: list[Any]) -> Outline | None:
        """The outline of a call, if it is known.

        Args:
            call: See `form_of_call`; None is never known.
            leaves: Of the arguments.
        """
        if call is None:
            return None
        key = self._key(call, leaves)
        outline = self._known.get(key)
        if outline is not None:
            self._known.move_to_end(key)
        elif self._like is not None:
            return self._like.find(call, leaves)
        return outline

    def keep(self, call: Call | None, leaves: list[Any], outline: Outline) -> None:
        """Remember the outline of a call."""
        returns = [leaf for leaf in outline.leaves if not isinstance(leaf, torch.Tensor)]
        if call is None or outline.rewrites or not all(isinstance(leaf, (*_PLAIN, Same)) for leaf in returns):
            return
        self._values_decide = self._values_decide or outline.from_values
        outline = _without_values(outline)
        self._known[self._key(call, leaves)] = outline
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        if len(self._known) > 1:
            return
        first = self._first_given.setdefault(call, self)
        of_first = first.find(call, leaves)
        if first is not self and of_first is not None and _described(of_first) == _described(outline):
            self._like = first

    def says_as_others(self, call: Call | None, how: Hashable, said: int) -> bool:
        """Whether another of its kind, which tells other units nothing, called the same functions, given the same."""
        first = None if call is None else self._first_given.get(call)
        return first is not None and first.silent.get(how) == said

    def _key(self, call: Call, leaves: list[Any]) -> Hashable:
        if not self._values_decide:
            return call
        return call, tuple(_digest(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))


def form_of_call(
    module: nn.Module, leaves: list[Any], structure: Any, device: torch.device, *, selects_all: bool = False
) -> Call | None:
    """All that decides what a module returns in form, beside attributes that a step does not change; None: unknown.

    Args:
        module: The module.
        leaves: Of its arguments; ordinary tensors.
        structure: What puts them together.
        device: Where it runs.
        selects_all: See `outline_call`.
    """
    given: list[Hashable] = []
    first: dict[int, int] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout != torch.strided:
                return None
            given.append((first.setdefault(id(leaf), index), _form(leaf), leaf.stride(), leaf.device, leaf.is_leaf))
        elif isinstance(leaf, _PLAIN):
            given.append((type(leaf), leaf))
        elif (form := _form_of_object(leaf)) is not None:
            given.append(form)
        else:
            return None
    held = tuple(
        None if tensor is None else (kind_of(tensor), _form(tensor))
        for part in module.modules()
        for named in tensors_of(part)
        for tensor in named.values()
    )
    parts = tuple((type(part), part.training) for part in module.modules())
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    process = torch.is_grad_enabled(), autocast, device, selects_all
    return Call((parts, held), (tuple(given), str(structure), process))


@dataclass
class Attributes:
    """What a call has made of the attributes of a module and its parts.

    Attributes:
        are_kept: Whether they have what they had.
        counted: Those with another number, and their parts, by name.
    """

    are_kept: bool = False
    counted: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def attributes_kept(module: nn.Module) -> Iterator[Attributes]:
    """Tells at its end whether the module and its parts have the attributes that they had."""
    found = Attributes()
    before = [(name, part, dict(vars(part))) for name, part in module.named_modules()]
    yield found
    found.are_kept = all(_are_same(vars(part), attributes) for _, part, attributes in before)
    for name, part, attributes in () if found.are_kept else before:
        now = vars(part)
        found.counted += [
            (name, key)
            for key, value in attributes.items()
            if type(value) in (int, float) and type(now.get(key)) in (int, float) and now[key] != value
        ]


def _are_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(now.get(name, now) is value for name, value in before.items())


class _FormWriter(pickle.Pickler):
    """Writes down an object, of tensors only their form; nobody reads it."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str((_form(value), value.stride(), value.device))
        return str(id(value)) if isinstance(value, (nn.Module, type)) or callable(value) else None


def _form_of_object(value: Any) -> bytes | None:
    """All of an object that is given to a module, such as a cache of keys and values; None: it cannot be told."""
    written = io.BytesIO()
    try:
        _FormWriter(written).dump(value)
    except Exception:  # objects decide themselves how they are written
        return None
    return written.getvalue()


def _form(tensor: torch.Tensor) -> Hashable:
    with DisableTorchFunctionSubclass():  # nobody else asks
        return tensor.shape, tensor.dtype, tensor.requires_grad


def _digest(tensor: torch.Tensor) -> Hashable:
    return hash(content_of(tensor).tobytes()) if tensor.numel() else 0


def _described(outline: Outline) -> Hashable:
    leaves = [_form(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in outline.leaves]
    return str((leaves, outline.structure, outline.changed, outline.saved_bytes, outline.varying, outline.detached))


def _without_values(outline: Outline) -> Outline:
    with following(None):
        return replace(
            outline,
            leaves=[Tracked.absent(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in outline.leaves],
        )


@contextmanager
def buffers_kept(units: Iterable[Any]) -> Iterator[None]:
    """Let units have other buffers of the same values while the context is open: what is repeated changes none."""
    before = [(module, dict(tensors_of(module).buffers)) for unit in units for module in unit.module.modules()]
    for module, buffers in before:
        tensors_of(module).buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        yield
    finally:
        for module, buffers in before:
            tensors_of(module).buffers.update(buffers)
