"""A layer with buffers of its own while a step runs on microbatches: what it is given, and how its buffers change."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import (
    DisableTorchFunctionSubclass,
    change_mark,
    memory_of,
)
from lightning_pfo.strategy.model.reach.places import LEFT_ALONE
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following, value_of
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.step.effects.layers.counters import has_sum, values_of

_STATE = (bool, int, float, str, type(None), torch.Tensor)


@dataclass
class Call:
    """A call of a layer in a microbatch: what it was given, and in a layer that is tried what it returned.

    Attributes:
        index: The microbatch.
        leaves: Its arguments, flattened.
        structure: What puts them together.
        contexts: Enter what it ran in.
        results: What it returned, flattened.
        states: The random generators before and after it.
    """

    index: int
    leaves: list[Any]
    structure: Any
    contexts: Callable[[], AbstractContextManager[Any]]
    results: list[Any] = field(default_factory=list)
    states: tuple[Any, ...] = ()


class ChangingLayer:
    """A module with buffers of its own, in a run on microbatches.

    Args:
        name: Its name.
        module: The module.
        units: The units that it calls, or is.
        own: The buffers.
        known: Those that are known to change, if it has been repeated before.
        counted: Attributes of which somebody else knows what they are in each microbatch.

    Attributes:
        calls: By stage and number of the call in a microbatch: those of all microbatches.
        changed: The buffers that have changed.
        changed_in: The microbatches in which they have.
        is_changed_now: Whether they have in the microbatch that is under way.
        memories: The memory of each buffer.
        units: The units that it calls, or is.
        tries: Whether it has not been repeated before.
        left: What its buffers were after the first microbatch that has changed them.
        result: What its buffers are at the end.
        result_state: What attributes are then, see `state`.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        units: Sequence[Unit],
        own: dict[str, torch.Tensor],
        known: set[str],
        counted: Collection[str] = (),
    ) -> None:
        self.name, self.module, self.units, self._own = name, module, units, own
        self._unit = unit = next((unit for unit in units if unit.module is module and not unit.followed_into), None)
        self._begun = {key: buffer.detach().clone() for key, buffer in own.items()}
        self._counted = {*counted, *LEFT_ALONE}
        self._begun_state = self.state()
        forward = module.forward if unit is None or unit.forward is None else unit.forward
        self.forward, self._around = _without_checkpoint(forward)
        self.calls: dict[tuple[int, int], list[Call]] = {}
        self.changed = known
        self.changed_in: list[int] = []
        self.is_changed_now = False
        self.memories = list(map(memory_of, own.values()))
        self.tries = not known
        self.left: dict[str, torch.Tensor] = {}
        self._grown: dict[str, torch.Tensor] = {}
        self._num_grown = 0
        self._current: dict[str, Any] = {**own}
        self._seen = self._prints() if self.tries else {}
        self.result: dict[str, torch.Tensor] | None = None
        self.result_state: dict[str, Any] | None = None

    @property
    def device(self) -> torch.device:
        """Where its buffers are."""
        return next(iter(self._own.values())).device

    def begin(self) -> None:
        """Let it have other buffers, with the values that the batch began with, and attributes likewise."""
        tensors_of(self.module).buffers.update({key: value.clone() for key, value in self._begun.items()})
        self._put_state_back()
        self.note_call()
        if self.tries:
            self._seen = self._prints()

    def state(self) -> dict[str, Any]:
        """Its attributes that may tell of buffers: that first values are taken, how much of a cache is filled."""
        held = vars(self.module).items()
        return {key: value for key, value in held if isinstance(value, _STATE) and key not in self._counted}

    def _put_state_back(self, state: dict[str, Any] | None = None) -> None:
        """Let attributes be what they were when the batch began, or something else."""
        state, attributes = self._begun_state if state is None else state, vars(self.module)
        for key in self.state().keys() - state:
            del attributes[key]
        attributes.update(state)

    def note_call(self) -> None:
        """Note which buffers it has, after a call."""
        self._current = dict(self._there())

    @property
    def is_repeated(self) -> bool:
        """Whether it has others while it is called: a later phase of a step repeats the call, which changes nothing."""
        there = dict(self._there())
        return any(there.get(key) is not each for key, each in self._current.items())

    def look(self) -> bool:
        """Whether buffers have changed since the last look."""
        now = self._prints()
        changed = {key for key, state in self._seen.items() if now.get(key) != state}
        self._seen = now
        self.changed |= changed
        self.is_changed_now = self.is_changed_now or bool(changed)
        return bool(changed)

    def grow(self, size: int) -> None:
        """Note what a microbatch of so many samples has left that began with what the batch began with."""
        now = self.now()
        self.left = self.left or now
        self._num_grown += size
        for key, value in now.items():
            if value.shape == self._begun[key].shape and (value.is_floating_point() or value.is_complex()):
                self._grown[key] = self._grown.get(key, 0) + size * (value - self._begun[key])

    def now(self) -> dict[str, torch.Tensor]:
        """Copies of its buffers."""
        with DisableTorchFunctionSubclass():
            return {key: value_of(each).detach().clone() for key, each in self._there()}

    def _prints(self) -> dict[str, tuple[Any, ...]]:
        """Others after a change, of their `data` too."""
        with following(None), DisableTorchFunctionSubclass():
            return {key: (id(each), change_mark(each), _sum_of(each)) for key, each in self._there()}

    def _there(self) -> Iterator[tuple[str, torch.Tensor]]:
        buffers = tensors_of(self.module).buffers
        return ((key, each) for key in self._own if (each := buffers.get(key)) is not None)

    @contextmanager
    def called_by(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Something else is called in place of its forward while the context is open."""
        if self._unit is not None:
            before, self._unit.forward = self._unit.forward, self._around(forward)
            try:
                yield
            finally:
                self._unit.forward = before
            return
        attributes = vars(self.module)
        before = attributes.get("forward")
        attributes["forward"] = self._around(forward)
        try:
            yield
        finally:
            attributes.pop("forward") if before is None else attributes.update(forward=before)

    def put_back(self, *, changed: bool) -> None:
        """Let the buffers themselves be there again, with the values of the end, or else of the begin."""
        if self.result_state is not None or (self.changed and not changed):
            self._put_state_back(self.result_state)
        values = self.result or self._begun
        if self.result is None and self.changed and changed:  # exact where it is an average, or the same for each
            grown = {key: self._begun[key] + by / self._num_grown for key, by in self._grown.items()}
            values = {key: each.detach() for key, each in self._there() if not isinstance(each, Tracked)} | grown
        buffers = tensors_of(self.module).buffers
        for key, buffer in self._own.items():
            value = values.get(key)
            if value is not None and value.shape != buffer.shape:
                buffers[key] = value
                continue
            if value is not None and value is not buffer and (self.changed or buffers.get(key) is not buffer):
                with torch.no_grad():
                    buffer.copy_(value)
            buffers[key] = buffer


def _without_checkpoint(forward: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Callable[..., Any]]]:
    """A forward that does not save memory by running again in backward, and what lets another one do so."""
    if isinstance(forward, functools.partial) and forward.func is checkpoint:
        inner, *rest = forward.args
        return inner, lambda other: functools.partial(forward.func, other, *rest, **forward.keywords)
    return forward, lambda other: other


def _sum_of(buffer: torch.Tensor) -> str:
    return str(float(values_of(buffer.detach()).sum(dtype=torch.double))) if has_sum(buffer) else ""
