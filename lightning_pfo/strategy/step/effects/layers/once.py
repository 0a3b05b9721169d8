"""Buffers that layers change by what they see, as a codebook's moving average, a centre or a queue: once for a batch.

On one device a layer sees the whole batch, and changes its buffers once. Here it is given microbatches. Each begins
with what the batch began with, in tensors of its own, which graphs may hold. When the batch is done, the layer runs
once more, without gradients, on what it was given in all microbatches, so that its buffers are those of one device.
Whether it can be repeated is tried in the first batch; there it is found, too, that it computes from other samples, as
batch norm does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import is_compiled, tensors_of
from lightning_pfo.strategy.model.batch_norm import BatchNorm
from lightning_pfo.strategy.model.reach.metric_objects import is_metric
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.layers.changing import ChangingLayer
from lightning_pfo.strategy.step.effects.layers.counters import is_plain
from lightning_pfo.strategy.step.effects.layers.repeating import LayersInRun

_LOOKED_AT = 3
"""So many batches are looked at."""
Place = tuple[str, str]
"""A layer and its buffer, by name."""
_log = logging.getLogger(__name__)


class BuffersOnce:
    """Lets the buffers of layers be those of one device.

    Args:
        root: The user's module.
        owners: The stages that have each unit.
        stages: Those of this rank.
        of_weights: Buffers that making a weight changes, as one device does.
        repeats: Whether layers can run once more: they are neither compiled nor divided.
        batch_dim: Where samples lie in a tensor, if there are several ways to take it.

    Attributes:
        repeated: The layers that were repeated in the latest run.
    """

    def __init__(
        self,
        root: nn.Module,
        owners: Mapping[Unit, frozenset[int]],
        stages: Collection[int],
        of_weights: Collection[str],
        *,
        repeats: bool,
        batch_dim: int,
    ) -> None:
        self._root = root
        self._owners = owners
        self._stages = stages
        self._of_weights = of_weights
        self._repeats = repeats
        self._batch_dim = batch_dim
        self._given_up: set[str] = set()
        self._run: LayersInRun | None = None
        self._untold: list[Place] = []
        self._batches: Counter[str] = Counter()
        self._places: dict[bool, set[Place]] = {True: set(), False: set()}
        self.repeated: set[str] = set()

    @property
    def ever_repeated(self) -> set[str]:
        """The layers that were repeated in a run; their attributes are those of one device too."""
        return {name for places in self._places.values() for name, _ in places}

    @contextmanager
    def of_run(
        self,
        kind: str,
        sizes: Sequence[int],
        again: Callable[[], AbstractContextManager[object]],
        counted: Collection[Place] = (),
        of_step: Collection[str] = (),
        *,
        stays: bool,
    ) -> Iterator[None]:
        """A step runs on microbatches.

        Args:
            kind: Which step it is.
            sizes: How many samples each has.
            again: Enters what layers run in once more.
            counted: Buffers and attributes of which somebody else knows what they are at the end of the batch.
            of_step: Those that the step changes between units, which are left alone but in modules of one stage.
            stays: Whether what it leaves in buffers stays.
        """
        places, looks = self._places[kind in ("train", "compare")], self._batches[kind] < _LOOKED_AT
        known = places.difference(counted)
        layers = self._layers(known, counted, of_step, looks=looks) if len(sizes) > 1 and (looks or known) else {}
        self.repeated = set()
        self._batches[kind] += stays and len(sizes) > 1
        if not layers:
            yield
            return
        before, self._run = self._run, LayersInRun(sizes, layers, self._given_up)
        is_over = False
        try:
            with self._run.followed():
                yield
            is_over = True
            if stays:
                self._end(self._run, again)
                places |= {(name, key) for name in self.repeated for key in layers[name].changed}
        finally:
            for layer in layers.values():
                layer.put_back(changed=stays and is_over)
            self._run = before

    def _layers(
        self, places: Collection[Place], counted: Collection[Place], of_step: Collection[str], *, looks: bool
    ) -> dict[str, ChangingLayer]:
        """Those that are known to change buffers, or where it is looked for them all that have some."""
        known: dict[str, set[str]] = {}
        for name, key in places:
            known.setdefault(name, set()).add(key)
        found: dict[str, ChangingLayer] = {}
        for name, module in self._root.named_modules():
            if not name or isinstance(module, BatchNorm) or is_metric(module) or not (looks or name in known):
                continue
            own = {
                key: each
                for key, each in tensors_of(module).buffers.items()
                if is_plain(each) and f"{name}.{key}" not in self._of_weights
            }
            inside = set(module.modules()) if own else set()
            units = [unit for unit in self._owners if unit.module in inside]
            if own and (self._are_here(units) or not any(f"{name}.{key}" in of_step for key in own)):
                others = {key for layer, key in counted if layer == name}
                found[name] = ChangingLayer(name, module, units, own, known.get(name, set()), others)
        if not self._repeats:
            self._given_up |= found.keys()
        compiled = [f"{name}." for name, module in self._root.named_modules() if looks and is_compiled(module)]
        self._given_up |= {name for name in found if any(map(name.startswith, compiled))}
        if looks:  # of tensors that several layers have, or parts of one, each would have its own
            holders = Counter(memory for layer in found.values() for memory in layer.memories)
            self._given_up |= {name for name, layer in found.items() if any(holders[m] > 1 for m in layer.memories)}
        return found

    def _are_here(self, units: Sequence[Unit]) -> bool:
        """Whether all that are called are of one stage of this rank."""
        stages = {self._owners[unit] for unit in units if self._owners[unit]}
        return len(stages) == 1 and all(len(each) == 1 and each.issubset(self._stages) for each in stages)

    def of_microbatch(self, stage: int, index: int) -> AbstractContextManager[None] | None:
        """A stage runs the step on a microbatch; None where nobody needs to know."""
        return None if self._run is None else self._run.of_microbatch(stage, index)

    def _end(self, run: LayersInRun, again: Callable[[], AbstractContextManager[object]]) -> None:
        """Let layers run once more that have changed their buffers in several microbatches."""
        changed = {name: layer for name, layer in run.layers.items() if len(layer.changed_in) > 1}
        able = [name for name, layer in changed.items() if layer.calls and name not in self._given_up]
        outer = [name for name in able if not any(name.startswith(f"{other}.") for other in able)]
        for name in outer:
            inner = [changed[other] for other in able if other.startswith(f"{name}.")]
            layers = [changed[name], *inner]
            try:
                with torch.no_grad():
                    if changed[name].tries:
                        with again():
                            run.try_again(layers)
                    with again():
                        run.repeat(layers, self._batch_dim)
            except Exception as error:
                _log.debug("%s cannot be repeated: %s", name, error)
                self._given_up |= {layer.name for layer in layers}
        for name, layer in changed.items():
            if layer.result is not None:
                self.repeated.add(name)
            else:
                self._untold += [(name, key) for key in sorted(layer.changed)]

    def tell(self, known: Collection[Place]) -> None:
        """A batch is done; a warning names a buffer that changes otherwise than on one device.

        Args:
            known: Buffers of which somebody else knows what they are at the end of the batch.
        """
        name, key = next((place for place in self._untold if place not in known), ("", ""))
        self._untold.clear()
        if name:
            way_out = "Use fewer microbatches (num_microbatches=...), or change it in the step or in a hook."
            if not self._repeats:
                way_out = "Without compile=True and fully_shard=True it is that of one device."
            warn_once(
                f"A layer changes its buffer self.{name}.{key}: once for each microbatch, as when gradients are "
                f"accumulated, and on one device once for the batch: a moving average goes further. {way_out} See "
                f"'Buffers of layers' in docs/strategy.md."
            )
