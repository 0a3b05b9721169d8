"""What else layers change in their forward: attributes and parameters are named, once."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, change_mark
from lightning_pfo.strategy.model.reach.places import LEFT_ALONE
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.layers.counters import has_sum, values_of

_LOOKED_AT = 3
"""So many batches; what is set in the first of them only is a cache."""
_SAME = 1e-3
"""So much less, or nothing, do later microbatches change a weight that the first one has limited, as its norm."""
Place = tuple[str, str]
"""A layer and its attribute, by name."""


class LayerLooks:
    """Looks at layers in each of the first batches.

    Args:
        modules: The layers of this rank and what is in them, by name.

    Attributes:
        of_step: Parameters and buffers that the step writes into by itself, as one device does.
        are_on: Whether the batch that is under way is looked at.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._before: dict[Place, Any] = {}
        self._batches = 0
        self._written: set[str] = set()
        self._differs: list[tuple[list[str], torch.Tensor]] = []
        self._first_values: set[str] = set()
        self.of_step: Collection[str] = ()
        self.are_on = False

    @property
    def are_first(self) -> bool:
        """Whether no batch was looked at before."""
        return not self._batches

    def begin(self, looks: bool) -> None:
        """A batch begins, which may be looked at."""
        self.are_on = looks and self._batches < _LOOKED_AT

    @contextmanager
    def of_microbatch(self) -> Iterator[None]:
        """A stage of this rank runs the step on a microbatch of a batch that is looked at."""
        parameters, sums = self._parameter_marks(), self._parameter_sums()
        try:
            yield
        finally:  # an exception ends a stage
            marks = self._parameter_marks()
            self._written |= {name for name in parameters.keys() - sums if marks.get(name) != parameters[name]}
            if sums:
                self._compare(sums, self._parameter_sums())

    def look(self, known: Collection[Place], known_layers: Collection[str] = ()) -> None:
        """A batch is done; a warning names what it has changed, but what is known to be as on one device."""
        if self._batches == _LOOKED_AT:
            return
        self._batches += 1
        self._look_at_parameters()
        now = {
            place: _print_of(value)
            for place, value in attributes_of(self._modules).items()
            if place not in known and place[0] not in known_layers
        }
        changed = [place for place, value in now.items() if self._batches > 1 and self._before.get(place) != value]
        if changed:
            name, key = changed[0]
            warn_once(
                f"A layer changes its attribute self.{name}.{key} in a step. Layers run on the rank of their stage "
                f"only, and once for each microbatch, which finds what the one before has left there, as when "
                f"gradients are accumulated. The step finds there the tensors that the layer has left for its "
                f"microbatch; hooks find another value than on one device. For hooks let the layer return "
                f"what is to be kept, and keep it in the step, in an attribute of the user's module."
            )
        self._before = now
        if changed or self._batches == _LOOKED_AT:
            self._batches, self._before = _LOOKED_AT, {}

    def _compare(self, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
        """Note by how much sums differ, where they are: nobody waits for a GPU before the batch is done."""
        names = [name for name in before if name in now]
        if names:
            old, new = (torch.stack([of[name] for name in names]) for of in (before, now))
            by = torch.where(old.isnan() & new.isnan(), 0.0, (new - old).abs())
            self._differs.append((names, by.nan_to_num(nan=torch.inf)))

    def _look_at_parameters(self) -> None:
        numbers = torch.cat([of_microbatch for _, of_microbatch in self._differs]).tolist() if self._differs else []
        names = [name for of_microbatch, _ in self._differs for name in of_microbatch]
        self._differs.clear()
        changes: dict[str, list[float]] = {}
        for name, by in zip(names, numbers, strict=True):
            if by:
                changes.setdefault(name, []).append(by)
        once = {name for name, (first, *later) in changes.items() if sum(later) <= _SAME * first}
        # what is limited is so in each batch, after each step of the optimizer
        self._written |= (changes.keys() - once) | (self._first_values - changes.keys())
        self._first_values = once if self._batches == 1 else set()
        name = min(self._written - set(self.of_step), default="")
        self._written.clear()
        if name:
            warn_once(
                f"A layer changes its parameter self.{name} in its forward, by what it sees: a microbatch, and on one "
                f"device the whole batch, as layers do that take their first values from the first batch (ActNorm). "
                f"Let them see a whole batch before: call the model before training (in on_train_start), on all ranks "
                f"(self.model(x), in training mode), where it runs in one piece. With num_microbatches=1 and "
                f"schedule='gpipe' all is that of one device."
            )

    def _parameter_marks(self) -> dict[str, tuple[int, int]]:
        """Others after a change."""
        return {name: change_mark(parameter) for name, parameter in self._parameters()}

    def _parameter_sums(self) -> dict[str, torch.Tensor]:
        """Others after a change through `data` too (`p.data.copy_(x)`), which marks do not tell; on their device."""
        with following(None), DisableTorchFunctionSubclass(), torch.no_grad():
            return {
                name: values_of(parameter.data).sum(dtype=torch.double)
                for name, parameter in self._parameters()
                if has_sum(parameter.data)
            }

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Not those of an embedding that limits norms: rows of it change in any batch alike."""
        for name, module in self._modules.items():
            if getattr(module, "max_norm", None) is None:
                for key, parameter in tensors_of(module).parameters.items():
                    if type(parameter) is nn.Parameter:
                        yield f"{name}.{key}", parameter


def attributes_of(modules: Mapping[str, nn.Module]) -> dict[Place, Any]:
    """What modules keep beside parameters, buffers and modules."""
    return {
        (name, key): value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if key not in LEFT_ALONE and key != "_buffers"
    }


def _print_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, dict, set, deque)):
        return id(value), len(value)
    return id(value) if isinstance(value, torch.Tensor) else None
