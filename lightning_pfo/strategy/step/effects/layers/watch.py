"""Numbers that layers keep in attributes or buffers of one element: they run on one rank, once for each microbatch.

Where the first batch, run by microbatches and in one piece, shows that a number grows by the sum of what it does in
microbatches, or by their mean, it does so on all ranks, at the end of each batch. If by the mean, as a number of calls
or a temperature that falls, each microbatch begins with what the batch began with. Layers are in evaluation mode there:
what grows in training only is found, and looked at so, where the first batch has been trained on. Of other buffers
`once` knows; see `looks` for what else they change.
"""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import tensors_of
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, change_mark
from lightning_pfo.strategy.model.batch_norm import BatchNorm
from lightning_pfo.strategy.step.effects.layers.counters import Counter, has_sum
from lightning_pfo.strategy.step.effects.layers.looks import LayerLooks, Place, attributes_of
from lightning_pfo.strategy.step.effects.layers.once import BuffersOnce

_NO_NUMBERS = (torch.bool, torch.uint8, torch.complex64, torch.complex128)
"""Types of flags, and of what is no single number."""
Numbers = dict[Place, Any]


class LayerWatch:
    """Lets numbers that layers keep grow as on one device, in every batch, and looks at the first batches.

    Args:
        root: The user's module.
        modules: The layers of this rank and what is in them, by name.
        of_weights: Buffers that making a weight changes, as one device does.
        once: Knows of other buffers of layers.

    Attributes:
        means: Numbers of this rank's layers, and whether they grow by the mean over microbatches; else by the sum.
        looks: What else layers change.
    """

    def __init__(
        self, root: nn.Module, modules: Mapping[str, nn.Module], once: BuffersOnce, of_weights: Collection[str] = ()
    ) -> None:
        self._of_weights = of_weights
        self._root = root
        self._modules = dict(modules)
        self._shared: dict[Place, nn.Module] = {}
        self._counted: set[Place] = set()
        self._going_on: set[str] = set()
        self._begin: dict[Place, Any] = {}
        self._grown: defaultdict[Place, list[tuple[int, Any]]] = defaultdict(list)
        self._shares: list[float] = []
        self._left: list[tuple[nn.Module, str, Any]] = []
        self._is_first = False
        self._rehearsed: tuple[dict[Place, Any], Numbers] | None = None
        self.means: dict[Place, bool] = {}
        self.once = once
        self.looks = LayerLooks(self._modules)

    @property
    def counted(self) -> Collection[Place]:
        """Buffers of one element that grow by the sum or the mean over microbatches."""
        return self._counted

    @property
    def counts(self) -> bool:
        """Whether a batch is under way in which numbers of layers are shared, or changes of buffers counted."""
        return self.looks.are_on or bool(self._shares) or self._rehearsed is not None

    @contextmanager
    def rehearsal(self) -> Iterator[Numbers]:
        """Each microbatch begins with what layers have now, while the context is open.

        Yields:
            By how much numbers of this rank's layers have grown in all microbatches that are over.
        """
        before, self._rehearsed = self._rehearsed, (attributes_of(self._modules) | self._counters(), {})
        begin, grown = self._rehearsed
        try:
            yield grown
        finally:
            self._rehearsed = before
            for place, counter in _counters_in(begin):
                if place in grown:
                    counter.put_back(self._buffers_of(place), place[1])

    @contextmanager
    def _from(
        self,
        begin: Mapping[Place, Any],
        places: Callable[[], Iterable[Place]],
        note: Callable[[Place, Any], object],
    ) -> Iterator[None]:
        """Numbers of some places of this rank are what they were at the begin; by how much they grow is noted."""
        counters = [(place, counter) for place, counter in _counters_in(begin) if place[0] not in self._going_on]
        sums: Numbers = {}
        for name, key in places():
            if name in self._going_on:
                continue
            if self.means.get((name, key)) is False:  # goes on: hooks may keep it, of whose numbers `effects` knows
                sums[name, key] = self._value_of(name, key)
            elif (name, key) in begin:
                vars(self._modules[name])[key] = begin[name, key]
            else:
                del vars(self._modules[name])[key]
        for place, counter in counters:
            counter.begin(self._buffers_of(place), place[1])
        others = {place[0]: self._others(place) for place, _ in counters}
        try:
            yield
        finally:  # an exception ends a stage
            self._going_on |= {place[0] for place, _ in counters if self._others(place) != others[place[0]]}
            for name, key in places():
                default, value = _of_class(self._modules[name], key), self._value_of(name, key)
                begun = sums.get((name, key), begin.get((name, key), default))
                if name not in self._going_on and _is_number(begun) and _is_number(value) and value != begun:
                    note((name, key), value - begun)
            for place, counter in counters:
                is_own = place[0] not in self._going_on and ".".join(place) not in self.looks.of_step
                if is_own and (by := counter.growth(self._buffers_of(place), place[1])) is not None:
                    note(place, by)

    def _value_of(self, name: str, key: str) -> Any:
        module = self._modules[name]
        return vars(module).get(key, _of_class(module, key))

    def _numbers(self) -> list[Place]:
        return [place for place, value in attributes_of(self._modules).items() if _is_number(value)]

    def _shared_here(self) -> list[Place]:
        return [place for place in self._shared if place[0] in self._modules]

    def _buffers_of(self, place: Place) -> dict[str, Any]:
        return tensors_of(self._modules[place[0]]).buffers

    def _counters(self) -> dict[Place, Counter]:
        """All buffers of one element that one layer has, as they are now."""
        found = {
            (name, key): buffer
            for name, module in self._modules.items()
            if not isinstance(module, BatchNorm)
            for key, buffer in tensors_of(module).buffers.items()
            if buffer is not None and _is_one(buffer) and f"{name}.{key}" not in self._of_weights
        }
        holders = Counts(map(id, found.values()))
        return {place: Counter(buffer) for place, buffer in found.items() if holders[id(buffer)] == 1}

    def _others(self, place: Place) -> list[tuple[int, int]]:
        """Marks of what a module holds beside its counters: with a flag that it has taken its first values it does."""
        module = self._modules[place[0]]
        held = [each for named in tensors_of(module) for each in named.values() if each is not None]
        with DisableTorchFunctionSubclass():
            return [change_mark(each) for each in held if type(each) is nn.Parameter or not _is_one(each)]

    def learn(self, by_parts: Numbers, whole: Numbers, number: int) -> None:
        """Compare by how much numbers have grown by so many microbatches, and by these as one batch."""
        for place in by_parts:
            grown, wanted = float(by_parts[place]), float(whole.get(place, 0))
            is_sum, is_mean = (math.isclose(grown, times * wanted, rel_tol=1e-3) for times in (1, number))
            if (is_sum or is_mean) and place[0] not in self._going_on:
                self.means[place] = is_mean

    def look(self) -> None:
        """A batch is done; a warning names what else it has changed."""
        self.once.tell(self._counted)
        self.looks.look(self._shared, self.once.ever_repeated)

    def share(self, places: Iterable[Place]) -> None:
        """Numbers of some layers, of which others may be on other ranks, are shared from there on."""
        modules = {place: self._root.get_submodule(place[0]) for place in sorted(places)}
        self._shared = {
            place: module for place, module in modules.items() if place[1] not in tensors_of(module).buffers
        }
        self._counted = {place for place in self.means if place not in self._shared}

    def begin(self, sizes: Sequence[int], *, looks: bool, learns: bool = False) -> None:
        """A batch begins, whose microbatches have so many samples; if it `looks`, there is a look at its end.

        If it `learns`, what has grown in the first one will be looked at.
        """
        self.looks.begin(looks)
        self._is_first = learns and looks and self.looks.are_first and len(sizes) > 1
        self._begin = self._now()
        if self._is_first:  # of others' layers too, in which a trace may count
            self._begin |= attributes_of(dict(self._root.named_modules(remove_duplicate=False))) | self._counters()
        else:
            counted: dict[Place, Any] = {place: self._buffers_of(place).get(place[1]) for place in self._counted}
            self._begin |= {place: Counter(buffer) for place, buffer in counted.items() if _is_one(buffer)}
        self._grown.clear()
        self._left.clear()
        is_needed = bool(self._shared or self._counted or self._is_first)
        self._shares = [size / max(1, sum(sizes)) for size in sizes] if is_needed else []

    @contextmanager
    def of_microbatch(self, index: int) -> Iterator[None]:
        """A stage of this rank runs the step on a microbatch, while layers count."""
        if self._rehearsed is not None:
            begin, grown = self._rehearsed
            with self._from(begin, self._numbers, lambda place, by: grown.update({place: grown.get(place, 0) + by})):
                yield
            return
        places = self._numbers if self._is_first else self._shared_here
        counting = self._from(self._begin, places, lambda place, by: self._grown[place].append((index, by)))
        with counting, self.looks.of_microbatch() if self.looks.are_on else nullcontext():
            yield

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
            learn({place[0] for place in self._grown if place not in self.means})
            for place, growths in self._grown.items():
                if place in self.means or place[0] in self.once.repeated:
                    continue
                # of what no rule gives, as of a maximum
                most = max((by for _, by in growths), key=lambda by: abs(float(by)))
                if isinstance(counter := self._begin.get(place), Counter):
                    counter.end(self._buffers_of(place), place[1], most)
                else:
                    vars(self._modules[place[0]])[place[1]] = self._begin_of(*place) + most
        shares, self._shares, self._is_first = self._shares, [], False
        grown = {
            place: sum(by * shares[index] if self.means[place] else by for index, by in growths)
            for place, growths in self._grown.items()
            if place in self.means
        }
        for place in self._counted & grown.keys():
            by = grown.pop(place)
            if place[0] not in self.once.repeated:
                self._begin[place].end(self._buffers_of(place), place[1], by)
        if not self._shared:
            return
        of_ranks = all_gather(grown)
        for (name, key), module in self._shared.items():
            begun = self._begin_of(name, key)
            now = begun + sum(grown.get((name, key), 0) for grown in of_ranks)
            self._left.append((module, key, round(now) if type(begun) is int else now))
        self.leave()

    def leave(self) -> None:
        """Let numbers that are shared be what the batch has left, also where others have put what they know of them."""
        for module, key, number in self._left:
            setattr(module, key, number)

    def _begin_of(self, name: str, key: str) -> Any:
        if (name, key) in self._begin:
            return self._begin[name, key]
        return _of_class(self._root.get_submodule(name), key)  # it did not have the number yet

    def _now(self) -> Numbers:
        return {
            place: vars(module).get(place[1], _of_class(module, place[1])) for place, module in self._shared.items()
        }


def _counters_in(begin: Mapping[Place, Any]) -> list[tuple[Place, Counter]]:
    return [(place, value) for place, value in begin.items() if isinstance(value, Counter)]


def _is_one(buffer: Any) -> bool:
    return has_sum(buffer) and buffer.numel() == 1 and buffer.dtype not in _NO_NUMBERS


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _of_class(module: nn.Module, key: str) -> int | float:
    """What a number of a module goes on from that it does not have itself yet (`self.calls += 1`): its class's."""
    value = getattr(type(module), key, 0)
    return value if _is_number(value) else 0
