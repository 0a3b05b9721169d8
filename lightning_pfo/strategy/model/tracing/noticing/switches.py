"""What a step sets of modules while it is traced, and what it recomputes."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

from torch import nn

from lightning_pfo.strategy.compat.autograd import Recompute, recompute_with
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.tracing.tracked import Run, current_run


def recomputation_noted(run: Run, events: Sequence[Any], found: list[tuple[int, int]]) -> Patches:
    """Note which events of a trace are recomputed together, until what is returned is closed."""

    def make(original: Recompute) -> Recompute:
        def around(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
            start = len(events)
            yield from original(*args, **kwargs)
            if current_run() is run and len(events) > start + 1:
                found.append((start, len(events)))

        return around

    patches = Patches()
    recompute_with(make, patches)
    return patches


ABSENT = object()
"""Stands for an attribute that a module does not have."""
_SWITCHES = (bool, int, float, str, type(None), Enum)


def switches_noted(run: Run, found: dict[tuple[nn.Module, str], Any]) -> Patches:
    """Note what was in the plain attributes of modules that the step itself sets, until what is returned is closed."""
    original: Any = nn.Module.__setattr__

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        if current_run() is run and isinstance(value, _SWITCHES):
            before = vars(module).get(name, ABSENT)
            if before is ABSENT or (isinstance(before, _SWITCHES) and before != value):
                found.setdefault((module, name), before)
        original(module, name, value)

    patches = Patches()
    patches.set(nn.Module, "__setattr__", set_attribute)
    return patches


def switched_back(found: Mapping[tuple[nn.Module, str], Any]) -> list[tuple[nn.Module, str]]:
    """Of noted attributes those that are again as they were; of an absent one, where it is gone."""
    return [place for place, before in found.items() if vars(place[0]).get(place[1], ABSENT) == before]


@contextmanager
def switches_kept(places: Sequence[tuple[nn.Module, str]]) -> Iterator[None]:
    """Put attributes back, however the context is left: a stage that ends a step early does not do what is behind."""
    before = [(vars(module), name, vars(module).get(name, ABSENT)) for module, name in places]
    try:
        yield
    finally:
        for attributes, name, value in before:
            if value is ABSENT:
                attributes.pop(name, None)
            else:
                attributes[name] = value
