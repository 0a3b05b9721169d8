"""Numbers that layers keep in attributes: they run on one rank only, once for each microbatch.

Where the first batch, run by microbatches and in one piece, shows that a number grows by the sum of what it does in
microbatches, or by their mean, it does so on all ranks, at the end of each batch, and each microbatch begins with what
the batch began with. Layers are in evaluation mode there: what grows in training only is found, and looked at so, where
the first batch has been trained on. Other attributes are named.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, change_mark
from lightning_pfo.strategy.model.batch_norm import BatchNorm
from lightning_pfo.strategy.model.reach.places import LEFT_ALONE
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.step.batches.notices import warn_once

_LOOKED_AT = 3
"""So many batches; what is set in the first of them only is a cache."""
_LARGEST = 2**22
"""Elements of a buffer or parameter whose values are looked at."""

Place = tuple[str, str]
"""A layer and its attribute, by name."""
Numbers = dict[Place, Any]


class LayerWatch:
    """Looks at layers after each of the first batches, and at those that count something after every batch.

    Args:
        root: The user's module.
        modules: The layers of this rank and what is in them, by name.
        of_weights: Buffers that making a weight changes, as one device does.

    Attributes:
        means: Numbers of this rank's layers, and whether they grow by the mean over microbatches; else by the sum.
        of_step: Parameters and buffers that the step writes into by itself, as one device does.
    """

    def __init__(
        self, root: nn.Module, modules: Mapping[str, nn.Module], of_weights: Collection[str] = frozenset()
    ) -> None:
        self._of_weights = of_weights
        self._root = root
        self._modules = dict(modules)
        self._before: dict[Place, Any] = {}
        self._batches = 0
        self._shared: dict[Place, nn.Module] = {}
        self._begin: dict[Place, Any] = {}
        self._grown: defaultdict[Place, list[tuple[int, float]]] = defaultdict(list)
        self._shares: list[float] = []
        self._is_first = False
        self._rehearsed: tuple[dict[Place, Any], Numbers] | None = None
        self.means: dict[Place, bool] = {}
        self._looks = False
        self._changed: dict[Place, set[int]] = {}
        self._written: set[str] = set()
        self._differs: list[tuple[list[str], torch.Tensor]] = []
        self.of_step: Collection[str] = ()

    @property
    def counts(self) -> bool:
        """Whether a batch is under way in which numbers of layers are shared, or changes of buffers counted."""
        return self._looks or bool(self._shares) or self._rehearsed is not None

    @contextmanager
    def rehearsal(self) -> Iterator[Numbers]:
        """Each microbatch begins with what layers have now, while the context is open.

        Yields:
            By how much numbers of this rank's layers have grown in all microbatches that are over.
        """
        before, self._rehearsed = self._rehearsed, (self._attributes(), {})
        try:
            yield self._rehearsed[1]
        finally:
            self._rehearsed = before

    @contextmanager
    def _from(
        self,
        begin: Mapping[Place, Any],
        places: Callable[[], Iterable[Place]],
        note: Callable[[Place, float], object],
    ) -> Iterator[None]:
        """Numbers of some places of this rank are what they were at the begin; by how much they grow is noted."""
        for name, key in places():
            if (name, key) in begin:
                vars(self._modules[name])[key] = begin[name, key]
            else:
                del vars(self._modules[name])[key]
        try:
            yield
        finally:  # an exception ends a stage
            for name, key in places():
                default = _of_class(self._modules[name], key)
                begun, value = begin.get((name, key), default), vars(self._modules[name]).get(key, default)
                if _is_number(begun) and _is_number(value) and value != begun:
                    note((name, key), value - begun)

    def _numbers(self) -> list[Place]:
        return [place for place, value in self._attributes().items() if _is_number(value)]

    def _shared_here(self) -> list[Place]:
        return [place for place in self._shared if place[0] in self._modules]

    def learn(self, by_parts: Numbers, whole: Numbers, number: int) -> None:
        """Compare by how much numbers have grown by so many microbatches, and by these as one batch."""
        for place in by_parts:
            grown, wanted = by_parts[place], whole.get(place, 0)
            is_sum, is_mean = (math.isclose(grown, times * wanted, rel_tol=1e-3) for times in (1, number))
            if is_sum or is_mean:
                self.means[place] = is_mean

    def share(self, places: Iterable[Place]) -> None:
        """Numbers of some layers, of which others may be on other ranks, are shared from there on."""
        self._shared = {place: self._root.get_submodule(place[0]) for place in sorted(places)}

    def begin(self, sizes: Sequence[int], *, looks: bool, learns: bool = False) -> None:
        """A batch begins, whose microbatches have so many samples; if it `looks`, there is a look at its end.

        If it `learns`, what has grown in the first one will be looked at.
        """
        self._looks, self._changed = looks and self._batches < _LOOKED_AT, {}
        self._is_first = learns and looks and not self._batches and len(sizes) > 1
        self._begin = (self._attributes() if self._is_first else {}) | self._now()
        self._grown.clear()
        self._shares = [size / max(1, sum(sizes)) for size in sizes] if self._shared or self._is_first else []

    @contextmanager
    def of_microbatch(self, index: int) -> Iterator[None]:
        """A stage of this rank runs the step on a microbatch, while layers count."""
        if self._rehearsed is not None:
            begin, grown = self._rehearsed
            with self._from(begin, self._numbers, lambda place, by: grown.update({place: grown.get(place, 0) + by})):
                yield
            return
        places = self._numbers if self._is_first else self._shared_here
        buffers = self._buffer_states() if self._looks else {}
        parameters = self._parameter_marks() if self._looks else {}
        sums = self._parameter_sums() if self._looks else {}
        try:
            with self._from(self._begin, places, lambda place, by: self._grown[place].append((index, by))):
                yield
        finally:
            now = self._buffer_states() if self._looks else {}
            marks = self._parameter_marks() if self._looks else {}
            self._written |= {name for name, mark in parameters.items() if marks.get(name, mark) != mark}
            if sums:
                self._compare(sums, self._parameter_sums())
            for place, state in buffers.items():
                if now.get(place) != state:
                    self._changed.setdefault(place, set()).add(index)

    def end(self, all_gather: Callable[[Any], list[Any]], learn: Callable[[set[str]], object]) -> None:
        """The batch is done; a collective call of the pipeline if any numbers are shared.

        Args:
            all_gather: Gathers what the ranks of the pipeline give.
            learn: Called where the first batch `learns`, with layers of this rank whose numbers have grown in a way
                that nobody knows. It runs them so that `learn` and `share` are told, if it can.
        """
        if not self._shares:
            return
        if self._is_first:
            learn({place[0] for place in self._grown if place not in self._shared})
            for (name, key), growths in self._grown.items():  # of the others, which may be an extreme value
                vars(self._modules[name])[key] = self._begin_of(name, key) + max((by for _, by in growths), key=abs)
        shares, self._shares, self._is_first = self._shares, [], False
        if not self._shared:
            return
        of_ranks = all_gather(
            {
                place: sum(by * shares[index] if self.means.get(place) else by for index, by in growths)
                for place, growths in self._grown.items()
                if place in self._shared
            }
        )
        for (name, key), module in self._shared.items():
            begun = self._begin_of(name, key)
            now = begun + sum(grown.get((name, key), 0) for grown in of_ranks)
            setattr(module, key, round(now) if type(begun) is int else now)

    def _begin_of(self, name: str, key: str) -> Any:
        if (name, key) in self._begin:
            return self._begin[name, key]
        module = self._root.get_submodule(name)  # not this rank's, or it did not have the number yet
        is_other = name not in self._modules
        return vars(module).get(key, _of_class(module, key)) if is_other else _of_class(module, key)

    def _now(self) -> Numbers:
        return {
            place: vars(module).get(place[1], _of_class(module, place[1])) for place, module in self._shared.items()
        }

    def look(self) -> None:
        """A batch is done; a warning names an attribute that it has changed."""
        if self._batches == _LOOKED_AT:
            return
        self._batches += 1
        self._look_at_buffers()
        self._look_at_parameters()
        now = {place: _print_of(value) for place, value in self._attributes().items() if place not in self._shared}
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

    def _look_at_buffers(self) -> None:
        for (name, key), microbatches in self._changed.items():
            is_of_step = f"{name}.{key}" in self.of_step  # of which something else is said
            if is_of_step or len(microbatches) == 1:  # such as one that the end of the step calls, on the whole batch
                continue
            warn_once(
                f"A layer changes its buffer self.{name}.{key}: once for each of {len(microbatches)} microbatches, as "
                f"when gradients are accumulated, and on one device once for the batch: a moving average goes further. "
                f"Use fewer microbatches (num_microbatches=...), or change it in the step or in a hook."
            )
            return

    def _compare(self, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]) -> None:
        """Note which sums differ, where they are: nobody waits for a GPU before the batch is done."""
        names = [name for name in before if name in now]
        if names:
            old, new = (torch.stack([of[name] for name in names]) for of in (before, now))
            self._differs.append((names, (old != new) & ~(old.isnan() & new.isnan())))

    def _look_at_parameters(self) -> None:
        differs = torch.cat([flags for _, flags in self._differs]).tolist() if self._differs else []
        names = [name for of_microbatch, _ in self._differs for name in of_microbatch]
        self._differs.clear()
        self._written |= {name for name, is_other in zip(names, differs, strict=True) if is_other}
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
                name: _values_of(parameter.data).sum(dtype=torch.double)
                for name, parameter in self._parameters()
                if _has_sum(parameter.data)
            }

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Not those of an embedding that limits norms: rows of it change in any batch alike."""
        for name, module in self._modules.items():
            if getattr(module, "max_norm", None) is None:
                for key, parameter in tensors_of(module).parameters.items():
                    if type(parameter) is nn.Parameter:
                        yield f"{name}.{key}", parameter

    def _buffer_states(self) -> dict[Place, tuple[Any, ...]]:
        """Others after a change, of their `data` too; of batch norms something else is said."""
        with following(None), DisableTorchFunctionSubclass():  # our question, not the step's
            return {
                (name, key): (id(buffer), change_mark(buffer), _sum_of(buffer))
                for name, module in self._root.named_modules()
                if name and not isinstance(module, BatchNorm)
                for key, buffer in tensors_of(module).buffers.items()
                if buffer is not None and f"{name}.{key}" not in self._of_weights
            }

    def _attributes(self) -> dict[Place, Any]:
        return {
            (name, key): value
            for name, module in self._modules.items()
            for key, value in vars(module).items()
            if key not in LEFT_ALONE and key != "_buffers"
        }


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _of_class(module: nn.Module, key: str) -> int | float:
    """What a number of a module goes on from that it does not have itself yet (`self.calls += 1`): its class's."""
    value = getattr(type(module), key, 0)
    return value if _is_number(value) else 0


def _has_sum(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not is_placeholder(tensor)
    return is_plain and not tensor.is_meta and tensor.numel() <= _LARGEST


def _values_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _sum_of(buffer: torch.Tensor) -> str:
    return str(float(_values_of(buffer).detach().double().sum())) if _has_sum(buffer) else ""


def _print_of(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, dict, set, deque)):
        return id(value), len(value)
    return id(value) if isinstance(value, torch.Tensor) else None
