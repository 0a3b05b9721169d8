"""Running a step on microbatches, and layers that change their buffers once more on the whole batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial, update_wrapper
from operator import attrgetter, itemgetter
from typing import Any

import torch

from lightning_pfo.strategy.compat.tensors import (
    DisableTorchFunctionSubclass,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.forms.remembered import buffers_kept
from lightning_pfo.strategy.model.tracing.tracked import Tracked, following, value_of
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.layers.changing import Call, ChangingLayer
from lightning_pfo.strategy.step.effects.layers.joining import are_same, as_one, differs


class LayersInRun:
    """Runs of a step on the microbatches of a batch."""

    def __init__(self, sizes: Sequence[int], layers: Mapping[str, ChangingLayer], given_up: set[str]) -> None:
        self._sizes = sizes
        self._given_up = given_up
        self._counts: dict[str, int] | None = None
        self._at = (0, 0)
        self._is_told = False
        self.layers = layers

    def followed(self) -> ExitStack:
        """Calls of layers are noted while the context is open."""
        stack = ExitStack()
        for name, layer in self.layers.items():
            if name not in self._given_up and not isinstance(layer.module, torch.jit.ScriptModule):
                stack.enter_context(layer.called_by(_Noted(self, layer)))
        return stack

    @contextmanager
    def of_microbatch(self, stage: int, index: int) -> Iterator[None]:
        """A stage runs the step on a microbatch."""
        self._at, self._counts = (stage, index), {}
        for name, layer in self.layers.items():
            layer.is_changed_now = False
            if layer.changed and name not in self._given_up:
                layer.begin()
        try:
            yield
        finally:  # an exception ends a stage
            self._counts = None
            for layer in self.layers.values():
                if layer.tries and layer.look():  # others have changed it than its own call
                    self._given_up.add(layer.name)
                if layer.is_changed_now:
                    layer.changed_in.append(index)
                    if layer.tries and layer.name not in self._given_up:
                        layer.grow(max(1, self._sizes[index]))

    def call(self, layer: ChangingLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer is called in the run."""
        if layer.is_repeated:
            return layer.forward(*args, **kwargs)
        if self._counts is None:  # once more in backward, to save memory
            if layer.changed and layer.name not in self._given_up:
                layer.begin()
            return layer.forward(*args, **kwargs)
        with following(None), DisableTorchFunctionSubclass():
            leaves, structure = tree_flatten((args, kwargs))
            if any(isinstance(leaf, Tracked) and leaf.is_absent for leaf in leaves):
                noted = None
            else:
                noted = Call(self._at[1], list(map(_kept, leaves)), structure, _contexts(layer.device))
        state = random_state.get_state(layer.device) if layer.tries else None
        result = layer.forward(*args, **kwargs)
        layer.note_call()
        if layer.tries and not layer.look() and not layer.changed:
            return result
        if noted is not None:
            if layer.tries:
                with following(None), DisableTorchFunctionSubclass():
                    noted.results = list(map(_kept, tree_leaves(result)))
                noted.states = state, random_state.get_state(layer.device)
            layer.is_changed_now = True
            count = self._counts[layer.name] = self._counts.get(layer.name, -1) + 1
            layer.calls.setdefault((self._at[0], count), []).append(noted)
        return result

    def try_again(self, layers: Sequence[ChangingLayer]) -> None:
        """Try whether a microbatch leaves the same when it is repeated.

        Raises:
            ValueError: If it does not.
        """
        with self._aside(layers):
            for _, (call, *_) in sorted(layers[0].calls.items(), key=itemgetter(0)):
                random_state.set_state(call.states[0], layers[0].device)
                results = tree_leaves(self._computed(layers[0], call, call.leaves))
                if differs(call.results, results):
                    raise ValueError("it returns something else")
            for layer in layers:
                if differs(list(layer.left.values()), list(layer.now().values())):
                    raise ValueError(f"it leaves something else in {layer.name}")

    def repeat(self, layers: Sequence[ChangingLayer], batch_dim: int) -> None:
        """Let a layer, and what is in it, see the whole batch.

        Raises:
            ValueError: If what it was given in microbatches cannot be put together.
        """
        outer = layers[0]
        for calls in outer.calls.values():
            calls.sort(key=attrgetter("index"))
        if any([call.index for call in calls] != list(range(len(self._sizes))) for calls in outer.calls.values()):
            raise ValueError("it is not called in each microbatch alike")
        try:
            self._see_whole(layers, batch_dim, same_once=True)
        except Exception:
            self._see_whole(layers, batch_dim, same_once=False)

    def _see_whole(self, layers: Sequence[ChangingLayer], batch_dim: int, *, same_once: bool) -> None:
        outer = layers[0]
        put_together = partial(as_one, sizes=self._sizes, batch_dim=batch_dim)
        with self._aside(layers):
            for place in sorted(outer.calls):
                calls = outer.calls[place]
                of_calls = [*zip(*(call.leaves for call in calls), strict=True)]
                sees_samples = any(not are_same(parts) for parts in of_calls)
                once_above = math.inf if not same_once else 1 if sees_samples else 0
                leaves = [put_together(parts, once_above=once_above) for parts in of_calls]
                results = tree_leaves(self._computed(outer, calls[0], leaves))
                if outer.tries:
                    self._compare(outer, calls, results, partial(put_together, once_above=once_above, averages=True))
            for layer in layers:
                layer.result, layer.result_state = layer.now(), layer.state()

    def _computed(self, layer: ChangingLayer, call: Call, leaves: list[Any]) -> Any:
        args, kwargs = tree_unflatten(leaves, call.structure)
        with call.contexts():
            return layer.forward(*args, **kwargs)

    @contextmanager
    def _aside(self, layers: Sequence[ChangingLayer]) -> Iterator[None]:
        """A layer runs once more; what else it changes is put back."""
        with ExitStack() as stack:
            stack.enter_context(untouched(layers[0].module))
            stack.enter_context(buffers_kept(layers[:1]))
            for layer in layers:
                layer.begin()
            for unit in layers[0].units:  # which are called here, whatever stages there are
                stack.callback(setattr, unit, "outside", unit.outside)
                unit.outside = None
            stack.enter_context(following(None))
            yield

    def _compare(
        self,
        layer: ChangingLayer,
        calls: Sequence[Call],
        whole: Sequence[Any],
        put_together: Callable[[Sequence[Any]], Any],
    ) -> None:
        if self._is_told or any(not random_state.same_state(*call.states) for call in calls):
            return  # or it has drawn other numbers
        try:
            parts = [put_together(each) for each in zip(*(call.results for call in calls), strict=True)]
        except ValueError:
            return
        if differs(parts, whole):
            self._is_told = True
            warn_once(
                f"What the layer self.{layer.name} computes for a sample depends on others, and on its buffers: it "
                f"sees microbatches of {' or '.join(map(str, sorted(set(self._sizes))))} samples, not the batch of "
                f"{sum(self._sizes)}, as batch norm does. For more samples use fewer microbatches "
                f"(num_microbatches=...) or larger batches. See 'Batch norm' in docs/strategy.md."
            )


class _Noted:
    """In place of the forward of a layer while a step runs; copies of the layer have the forward itself."""

    def __init__(self, run: LayersInRun, layer: ChangingLayer) -> None:
        update_wrapper(self, layer.forward)
        self._run, self._layer = run, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # of that nothing can be noted
            return self._layer.forward(*args, **kwargs)
        return self._run.call(self._layer, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._layer.forward, memo)


def _kept(leaf: Any) -> Any:
    return value_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _contexts(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What enters automatic mixed precision as it is now."""
    kind = device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype=dtype, enabled=enabled)
