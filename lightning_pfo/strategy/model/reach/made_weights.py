"""Weights that are made of others: where a layer runs; and what that changes, as a power iteration, once for a batch.

A parametrization computes a weight from others, so what it writes does not depend on the batch: each microbatch begins
with what the batch began with, makes the same weight as one device does, and leaves the same behind.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_pfo.strategy.compat.modules import forward_pre_hooks_of
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import change_mark

Buffers = Sequence[torch.Tensor]
_ListsBuffers = Callable[[], Buffers]


class MadeWeights:
    """What makes weights of others and changes buffers in doing so: parametrizations, and torch's older spectral norm.

    Args:
        root: The user's module.
        followed: Modules whose calls are followed; they are left alone.
        patches: Gives what makes weights back when it is closed.

    Attributes:
        names: Their buffers.
    """

    def __init__(self, root: nn.Module, followed: Collection[nn.Module], patches: Patches) -> None:
        self._left: dict[Any, tuple[Buffers, _Values]] = {}
        self._begun: dict[tuple[Any, int], _Values] | None = None
        self._counts: dict[Any, int] | None = None
        found: list[torch.Tensor] = []
        for module in root.modules():
            for maker, name, buffers in _makers_of(module):
                if maker not in followed:
                    patches.set(maker, name, _Once(self, maker, getattr(maker, name), buffers))
                    found += buffers()
        of_makers = set(map(id, found))
        self.names = {name for name, buffer in root.named_buffers(remove_duplicate=False) if id(buffer) in of_makers}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the microbatches of a training batch, or of a phase of one."""
        self._begun, self._left = {}, {}
        try:
            yield
            for buffers, values in self._left.values():  # layers that run again in backward have changed them once more
                values.put_back(buffers)
        finally:
            self._begun, self._left = None, {}

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Run the step on a microbatch; calls outside of one begin as the first one of a step does."""
        self._counts = {}
        try:
            yield
        finally:
            self._counts = None

    def make(self, maker: Any, make: Callable[[], Any], buffers: Buffers) -> Any:
        """Let something make a weight, from what its buffers were when it was to do so first in this batch."""
        if self._begun is None:
            return make()
        number = 0
        if self._counts is not None:
            number = self._counts.get(maker, 0)
            self._counts[maker] = number + 1
        if (begun := self._begun.get((maker, number))) is None:
            self._begun[maker, number] = _Values(buffers)
        else:
            begun.put_back(buffers)
        made = make()
        if self._counts is not None:
            self._left[maker] = buffers, _Values(buffers)
        return made


def find_made_weights(root: nn.Module, followed: Collection[nn.Module], patches: Patches) -> MadeWeights | None:
    """What makes weights and changes buffers in doing so; None if nothing does."""
    found = MadeWeights(root, followed, patches)
    return found if found.names else None


class _Once:
    """In place of a function that makes a weight; a copy of its object has that function."""

    def __init__(self, weights: MadeWeights, maker: Any, make: Callable[..., Any], buffers: _ListsBuffers) -> None:
        functools.update_wrapper(self, make)
        self._weights, self._maker, self._make, self._buffers = weights, maker, make, buffers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._weights.make(self._maker, functools.partial(self._make, *args, **kwargs), self._buffers())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._make, memo)


class _Values:
    """What buffers are now, for who puts it back.

    Args:
        buffers: The buffers.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._values = [buffer.detach().clone() for buffer in buffers]
        self._marks = [change_mark(buffer) for buffer in buffers]

    @torch.no_grad()
    def put_back(self, buffers: Buffers) -> None:
        """Write it into those that are others now: what a weight is made of and stays, as a mask, may be in a graph."""
        for index, (buffer, value) in enumerate(zip(buffers, self._values, strict=True)):
            on_host = buffer.device.type == "cpu"  # nobody waits for another device
            if not torch.equal(buffer, value) if on_host else change_mark(buffer) != self._marks[index]:
                buffer.copy_(value)
                self._marks[index] = change_mark(buffer)


def _makers_of(module: nn.Module) -> Iterator[tuple[Any, str, _ListsBuffers]]:
    """What makes weights of a module, by which of its functions, and where the buffers are that this changes."""
    if isinstance(module, parametrize.ParametrizationList):
        for parametrization in module:
            if next(parametrization.buffers(), None) is not None:
                yield parametrization, "forward", functools.partial(_buffers_of, parametrization)
    for hook in _hooks_that_make_weights(module):
        if isinstance(hook, SpectralNorm):
            names = [f"{hook.name}_u", f"{hook.name}_v"]
            yield hook, "compute_weight", functools.partial(_named_buffers_of, module, names)


def _buffers_of(module: nn.Module) -> Buffers:
    return list(module.buffers())


def _named_buffers_of(module: nn.Module, names: Sequence[str]) -> Buffers:
    return [getattr(module, name) for name in names]


def make_weights_within(model: nn.Module, patches: Patches) -> None:
    """Let weights that torch makes of others before a module's forward be made in it, until `patches` is closed.

    `torch.nn.utils.weight_norm`, `spectral_norm` and `prune` do so in a hook, which is called where the module is: on
    every rank. In its forward it is called where a stage computes the module, and there its parameters are.
    """
    for module in model.modules():
        hooks = forward_pre_hooks_of(module)
        own = [(key, hook) for key, hook in hooks.items() if type(hook).__module__.startswith(_MAKERS)]
        if own:
            patches.set(module, "forward", _Making(module, module.forward))
        for key, hook in own:
            hooks[key] = stand_in = _Within(hook)
            patches.callback(_put_back, hooks, key, stand_in)


def _hooks_that_make_weights(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks that are called in a module's forward; see `make_weights_within`."""
    return [hook.hook for hook in forward_pre_hooks_of(module).values() if type(hook) is _Within]


_MAKERS = "torch.nn.utils."
"""Modules whose hooks make a module's weights."""


class _Making:
    """The forward of a module, which makes its weights first."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self._module, self._forward = module, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in forward_pre_hooks_of(self._module).values():
            if type(hook) is _Within:
                hook.hook(self._module, args)
        return self._forward(*args, **kwargs)


class _Within:
    """Is called in place of a hook that is called in the forward; copies of the module have the hook.

    Who looks for the hook finds it here, as `torch.nn.utils.prune.remove` does.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self.hook)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "hook":
            raise AttributeError(name)
        return getattr(self.hook, name)

    def __call__(self, module: nn.Module, args: Any) -> None:
        pass

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.hook, memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.hook,)  # as files have it


def _put_back(hooks: MutableMapping[int, Any], key: int, stand_in: _Within) -> None:
    if hooks.get(key) is stand_in:  # its handle may have removed it
        hooks[key] = stand_in.hook
