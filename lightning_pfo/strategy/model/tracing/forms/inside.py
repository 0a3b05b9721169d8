"""What happens inside an event of a trace: units that a function calls, tracked tensors that it finds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass
from lightning_pfo.strategy.model.tracing.events import Event
from lightning_pfo.strategy.model.tracing.forms.left import returned_of
from lightning_pfo.strategy.model.tracing.forms.outline import Outline, Same, of_zero_weights
from lightning_pfo.strategy.model.tracing.forms.values import on_zeros, zeros_of
from lightning_pfo.strategy.model.tracing.noticing.applied import in_transform
from lightning_pfo.strategy.model.tracing.tracked import plain
from lightning_pfo.strategy.model.tracing.trees import tree_flatten, tree_unflatten


class Around(Protocol):
    """The run that traces the step."""

    def decide(self, labels: Iterable[int]) -> None:
        """Python has looked at sizes of values."""

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter] = ()) -> None:
        """The step optimizes by itself."""

    def use_inside(self, event: Event, values: Any) -> None:
        """Tracked tensors reach the inside of an event."""

    def outline(self, event: Event, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Outline:
        """What a unit would return."""

    def note(self, values: Any) -> None:
        """Values are wanted at the end."""

    def listen(self, event: Event) -> None:
        """What runs inside of an event says something, such as a layer that logs."""

    def begin_inside(self, unit: Any) -> None:
        """A layer is called inside of the event that is under way."""


class Inside:
    """Follows what happens inside an event."""

    def __init__(self, run: Around, event: Event) -> None:
        self.was_asked = False
        self._run, self._event = run, event

    def told(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], answer: Any) -> Any:
        """Of the form of a tensor: sizes inside are what they are."""
        return answer

    def decide(self, labels: Iterable[int]) -> None:
        """See `Around`."""
        self._run.decide(labels)

    def optimize(self, loss: Any, changed: Iterable[nn.Parameter] = ()) -> None:
        """See `Around`."""
        self._run.optimize(loss, changed)

    def looks_again(self, weights: Sequence[torch.Tensor]) -> bool:
        """What is inside of a layer is followed with it."""
        return True

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch on zeros."""
        self.was_asked = True
        self._run.use_inside(self._event, (args, kwargs))
        return on_zeros(function, args, kwargs)

    def call(self, unit: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a unit would, in form."""
        self.was_asked = True
        if unit not in self._event.units:
            self._event.units.append(unit)
        if in_transform():
            self._run.begin_inside(unit)
            return of_zero_weights(unit.module, unit.forward, args, kwargs)
        outline = self._run.outline(self._event, unit, args, kwargs)
        leaves, _ = tree_flatten((args, kwargs))
        given = [plain(leaf) for index, leaf in enumerate(leaves) if index not in outline.detached]
        found = [
            leaves[leaf.argument]
            if isinstance(leaf, Same)
            else _depending(zeros_of(leaf), given)
            if isinstance(leaf, torch.Tensor)
            else leaf
            for leaf in outline.leaves
        ]
        return returned_of(outline, tree_unflatten(found, outline.structure), (args, kwargs))

    def enter(self, unit: Any) -> None:
        """Layers inside of events are no places for boundaries."""

    def note(self, values: Any) -> None:
        """See `Around`."""
        self.was_asked = True
        self._run.note(values)
        self._run.listen(self._event)


def need_gradients(tensor: torch.Tensor) -> None:
    """Let a tensor need gradients from now on, as one into which a layer writes what needs them."""
    with DisableTorchFunctionSubclass():
        tensor.add_(torch.zeros((), dtype=tensor.dtype, device=tensor.device, requires_grad=True))


def _depending(result: torch.Tensor, given: Iterable[Any]) -> torch.Tensor:
    """Let zeros lead autograd to what a unit was given: by that it is told what a layer detaches."""
    if not result.requires_grad:
        return result
    with DisableTorchFunctionSubclass():
        for leaf in given:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
                result = result + real[None][:0].sum().to(result.device)
    return result
