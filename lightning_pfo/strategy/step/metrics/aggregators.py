"""torchmetrics objects to which counts what they are told at once (`SumMetric`): they are told once for a batch.

Other metrics are told of samples, of microbatches as of batches, and come to the same. These are told numbers, mostly a
loss: a sum of those of microbatches is no sum of those of batches. And a `Running` metric, of whatever kind, keeps the
last few of what it is told; one with a state that is a mean over updates, or is reduced by a function of its class,
depends on what it is told at once. So each run of a step finds them as they were at the
begin of the batch, what it tells them is noted like what it says to loggers, and said to them where the step ends, when
the batch is done, with values merged.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.compat import needs_whole_batches
from lightning_pfo.strategy.model.reach.metric_objects import is_metric
from lightning_pfo.strategy.model.reach.places import Path, Places
from lightning_pfo.strategy.model.variables import is_of_library, packages_of
from lightning_pfo.strategy.step.effects.outward.noted import note_call
from lightning_pfo.strategy.step.effects.outward.told import MetricPlace, ToldMetric
from lightning_pfo.strategy.step.metrics.compat import (
    note_changes,
    progress_of,
    put_back,
    update_each,
    windows_go_on,
)
from lightning_pfo.strategy.step.metrics.states import collections_in

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


class Aggregators:
    """Those that a module holds, itself or in containers and objects that a step reaches.

    Args:
        owner: The module.
        patches: Gives them back when it is closed.

    Attributes:
        ids: Their ids.
        told: How often the run of the step that is under way has told each something, by its id.
    """

    def __init__(self, owner: nn.Module, patches: Patches) -> None:
        holders = {(): owner, **Places(owner).modules} if "torchmetrics" in sys.modules else {}
        self._by_place = found = _aggregators_in(holders)
        self.ids = frozenset(map(id, found.values()))
        self.told: Counter[int] = Counter()
        for place, metric in found.items():
            told = ToldMetric(place, metric, not is_of_library(type(metric), packages_of(owner)))
            note_changes(metric, partial(self._note, told), patches)
        for collection in _collections_of(holders.values(), self.ids):
            update_each(collection, patches)

    def __bool__(self) -> bool:
        return bool(self._by_place)

    @contextmanager
    def as_at_begin(self) -> Iterator[None]:
        """Have them be, when the context is closed, as they are now."""
        metrics = self._by_place.values()
        before = [progress_of(metric) for metric in metrics]
        try:
            yield
        finally:
            for metric, progress in zip(metrics, before, strict=True):
                put_back(metric, progress)

    def windows_go_on(self, told: Iterable[tuple[MetricPlace, str]]) -> None:
        """Let windows stand here where they stand on the rank that was told of a batch.

        Args:
            told: Places of metrics, and the methods that the batch has called there.
        """
        windows_go_on((self._by_place[place], method) for place, method in told)

    def _note(self, metric: ToldMetric, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.told[id(metric.metric)] += 1
        note_call(((("metric", metric), ("attribute", method)), args, kwargs))


def _aggregators_in(holders: Mapping[Path, nn.Module]) -> dict[MetricPlace, Metric]:
    """Aggregators by their places, each once, but those that other metrics use for themselves.

    Args:
        holders: The user's module, and modules beside, by how they are reached.
    """
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return {}
    basic, running = torchmetrics.aggregation.BaseAggregator, torchmetrics.wrappers.Running
    found: dict[MetricPlace, Metric] = {}
    seen: set[int] = set()  # a dict may have what is an attribute too
    for root, holder in holders.items():
        modules = dict(holder.named_modules())
        inside = tuple(f"{path}." if path else "" for path, module in modules.items() if is_metric(module))
        for path, module in modules.items():
            is_one = isinstance(module, (basic, running)) or (is_metric(module) and needs_whole_batches(module))
            if is_one and id(module) not in seen and (root or path) and not (path and path.startswith(inside)):
                seen.add(id(module))
                found[root, path] = module
    return found


def _collections_of(holders: Iterable[nn.Module], ids: Collection[int]) -> list[MetricCollection]:
    """Collections that hold several of these metrics, which are told by their ids: comparing metrics makes a metric."""
    collections = collections_in([module for holder in holders for module in holder.modules()])
    return [each for each in collections if len(set(ids).intersection(map(id, each.children()))) > 1]
