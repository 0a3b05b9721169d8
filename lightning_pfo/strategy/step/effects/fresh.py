"""Each run of a step has its microbatch as it came: traces, comparisons and several stages of a rank run it anew.

Steps take labels out of dicts (`batch.pop("labels")`) and write into tensors (`images.div_(255)`). Containers are made
anew for each run, which costs little. Tensors are copied until a step of their kind has been seen to leave them alone.
Hooks that are given the batch find in it what the step has put there (`batch["pred"] = self(batch["x"])`), and not what
it has taken out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.compat.tensors import change_mark, tree_map_only
from lightning_pfo.strategy.step.batches.structures import PLAIN, has_samples, taken_apart
from lightning_pfo.strategy.step.effects.outward.calls import OF_BATCH
from lightning_pfo.strategy.step.effects.outward.noted import note_call

Name: TypeAlias = tuple[str, Any]
"""How a part is reached from its container: as an `item` or an `attribute`, and which; or that an item is `gone`."""

_LONGEST = 1_000
"""Lists of more texts or numbers are not looked through for what a step puts there."""


class FreshBatches:
    """Lets each run of a step have a batch of its own.

    Attributes:
        writes: Whether a step has been seen to write into tensors of its batch.
    """

    def __init__(self) -> None:
        self.writes = False
        self._known: set[str] = set()

    def given_to(self, kind: str, step: Callable[..., Any], *, tells: bool) -> Callable[..., Any]:
        """A step on batches of its own.

        Args:
            kind: Its kind, such as `train`.
            step: The step.
            tells: Whether somebody is given the batch afterwards: what it has put there is told like calls of others.
        """

        def run(batch: Any, *rest: Any) -> Any:
            copies = self.writes or kind not in self._known
            own = anew(batch, copies=copies)
            before = held(own) if tells or copies else None
            try:
                result = step(own, *rest)
            finally:  # stages that are not the last end by an exception
                self._known.add(kind)
                if copies and before is not None:
                    self.writes = self.writes or before.is_written_into(within=True)
            for path, value in written(own, before) if tells else ():
                note_call(((OF_BATCH, *path), (value,), {}))
            return result

        return run


@dataclass(frozen=True)
class Held:
    """What a part of a batch was before a step: the object, the mark of a tensor, and its own parts."""

    value: Any
    mark: object
    parts: Mapping[Name, Held]

    def is_written_into(self, *, within: bool = False) -> bool:
        """Whether something has been written into it, if it is a tensor; also into tensors within, if these count."""
        if self.mark is not None and change_mark(self.value) != self.mark:
            return True
        return within and any(part.is_written_into(within=True) for part in self.parts.values())


_NOTHING_WITHIN: Mapping[Name, Held] = {}


def held(value: Any) -> Held:
    """What a batch is before a step."""
    if isinstance(value, torch.Tensor):
        return Held(value, change_mark(value), _NOTHING_WITHIN)
    return Held(value, None, {name: held(part) for name, part in _items_of(value)})


def written(value: Any, before: Held | None) -> Iterator[tuple[tuple[Name, ...], Any]]:
    """What a step has put into a batch, taken out, or written into its tensors, each with the way there."""
    if before is None or value is not before.value or before.is_written_into():
        yield (), value
        return
    for name, part in () if isinstance(value, torch.Tensor) else _items_of(value):
        for path, found in written(part, before.parts.get(name)):
            yield (name, *path), found
    if isinstance(value, MutableMapping):
        yield from (((("gone", key),), None) for kind, key in before.parts if kind == "item" and key not in value)


def put(batch: Any, path: Sequence[Name], value: Any) -> None:
    """Put something into a batch where a step has put it, or take it out."""
    last: Any
    kind, last = path[-1] if path else ("", None)
    for how, name in path[:-1]:
        batch = getattr(batch, name) if how == "attribute" else batch[name]
    if kind == "attribute":
        object.__setattr__(batch, last, value)
    elif kind == "gone":
        batch.pop(last, None)
    elif isinstance(batch, (MutableMapping, list)):
        batch[last] = value
    else:  # it has been written into
        tensor = batch[last] if path else batch
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            tensor.copy_(value)


def _items_of(value: Any) -> Iterator[tuple[Name, Any]]:
    """The parts of a container, each with how it is reached from there."""
    if isinstance(value, Mapping):
        for key in list(value.keys()):  # of a TensorDict too
            if (part := value[key]) is value[key]:  # others make it when they are asked
                yield ("item", key), part
    elif isinstance(value, (list, tuple)):
        is_long = len(value) > _LONGEST and type(value[0]) in PLAIN
        for index, part in enumerate(() if is_long else value):
            yield ("item", index), part
    elif type(value) not in PLAIN and not has_samples(value):
        parts = taken_apart(value)
        for name, part in () if parts is None else zip(parts.names, parts.values, strict=True):
            yield ("attribute", name[1:]), part


def anew(value: Any, *, copies: bool) -> Any:
    """A batch in new containers.

    Args:
        value: The batch, or a part of it.
        copies: Whether tensors and other values with samples are copied; else they are the same.
    """
    kind = type(value)
    if kind is torch.Tensor:
        return value.clone() if copies else value
    if kind in PLAIN:
        return value
    if kind is dict:
        return {key: anew(part, copies=copies) for key, part in value.items()}
    if kind is list:
        return [anew(part, copies=copies) for part in value]
    if kind is tuple:
        return tuple(anew(part, copies=copies) for part in value)
    if isinstance(value, torch.Tensor):  # of a class of its own, such as bounding boxes
        return value.clone() if copies else value
    if has_samples(value):
        return copy.deepcopy(value) if copies else copy.copy(value)
    parts = taken_apart(value)
    if parts is None:
        return value
    try:
        return parts.rebuild([anew(part, copies=copies) for part in parts.values])
    except BatchError:  # a mapping that nobody but its user makes
        return value


@contextmanager
def without_inference_mode(values: Any) -> Iterator[Any]:
    """Values as ordinary tensors, and no inference mode: in it tensors do not tell whether they have been changed."""
    if not torch.is_inference_mode_enabled():
        yield values
        return
    with torch.inference_mode(False), torch.no_grad():
        yield tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if tensor.is_inference() else tensor, values)
