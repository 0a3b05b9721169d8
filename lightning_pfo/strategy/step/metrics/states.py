"""torchmetrics objects in pipelined steps: updated on the rank of the last stage, computed everywhere.

Only the last stage runs whole steps, so only its rank's copies of the metrics are updated. Whenever a metric is
computed on all ranks (Lightning does so at the end of an epoch), its state is taken from there, not reduced. Metrics
that hooks update have the same state on all ranks, and are treated alike.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.reach.metric_objects import is_metric
from lightning_pfo.strategy.model.reach.of_trainer import trainer_of
from lightning_pfo.strategy.model.reach.places import Path, Places, named
from lightning_pfo.strategy.parallel.groups import tell_all
from lightning_pfo.strategy.step.effects.outward.told import MetricPlace
from lightning_pfo.strategy.step.effects.within import step_meets_replicas, within_step
from lightning_pfo.strategy.step.metrics.compat import (
    Way,
    computed_of,
    count_updates_of,
    left_as_it_is,
    state_of,
    synchronise_by,
    update_each,
    updates_of,
)

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection


_MANY = 250
"""Nobody looks into the items of containers that have more."""


def metrics_in(modules: Iterable[nn.Module]) -> list[Metric]:
    """The metric objects among modules, each once; they are told by their ids, since their `==` makes a new metric."""
    return list({id(module): module for module in modules if is_metric(module)}.values())


def collections_in(modules: Iterable[nn.Module]) -> list[MetricCollection]:
    """The collections of metrics among modules."""
    torchmetrics = sys.modules.get("torchmetrics")
    return [] if torchmetrics is None else [each for each in modules if isinstance(each, torchmetrics.MetricCollection)]


def modules_around(owner: nn.Module) -> list[nn.Module]:
    """A module's own, and those that its layers and callbacks hold or its step reaches."""
    modules = list(owner.modules())
    callbacks = getattr(trainer_of(owner), "callbacks", ())
    held = [within for holder in (*modules, *callbacks) for within in _modules_in(getattr(holder, "__dict__", {}))]
    return [*modules, *held, *Places(owner).all_modules()]


def _modules_in(value: Any, depth: int = 3) -> Iterator[nn.Module]:
    """Modules in containers, and those within them."""
    if isinstance(value, nn.Module):
        yield from value.modules()
    elif isinstance(value, (dict, list, tuple)) and depth and len(value) <= _MANY:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _modules_in(item, depth - 1)


class PipelineMetrics:
    """The metrics of a process whose pipeline updates them on one rank.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module.
        replica_group: The processes with the same stages; None where there is one replica.
        patches: Gives metrics back when it is closed.
    """

    def __init__(
        self, engine: PipelineEngine, owner: nn.Module, replica_group: dist.ProcessGroup | None, patches: Patches
    ) -> None:
        self._engine = engine
        self._replica_group = replica_group
        self._patches = patches
        self._source = engine.last_rank
        self._is_known = False
        around = modules_around(owner)
        self._at_first = metrics_in(around)
        self.found(around)

    def found(self, modules: Iterable[nn.Module]) -> list[Metric]:
        """Return the metrics among modules, and those that there were at first.

        From here on they are computed as the pipeline needs it.
        """
        metrics = metrics_in([*self._at_first, *modules])
        if not self._is_known and "torchmetrics" in sys.modules:
            self._is_known = True
            synchronise_by(Way(self._take, self._count), self._patches)
        count_updates_of(metrics, self._patches)
        if self._engine.num_ranks > 1:  # where one rank alone really updates them, it alone would find some to be alike
            for collection in collections_in(modules):
                update_each(collection, self._patches)
        return metrics

    def _count(self, num_updates: int) -> tuple[int, bool]:
        """How often a metric was updated that is about to be computed, on the rank that counts; and is it the last?"""
        if within_step():
            return num_updates, True
        counts: list[int] = self._engine.all_gather(num_updates)
        self._source = self._engine.last_rank
        if not counts[self._source] and any(counts) and self._replica_group is None:
            # no step has updated it: a hook has, where it had what it needed, such as predictions on the first rank
            self._source = next(rank for rank, number in enumerate(counts) if number)
        return counts[self._source], self._source == self._engine.last_rank

    def _take(self, metric: Metric, ordinary: Callable[..., None]) -> None:
        """Let a metric have the state of one rank of the pipeline, reduced over replicas, not that of all ranks."""
        engine, source, self._source = self._engine, self._source, self._engine.last_rank
        if within_step():  # which this rank alone may run
            if self._replica_group is not None and step_meets_replicas():
                ordinary(process_group=self._replica_group)
            return
        if self._replica_group is not None and engine.rank == source:
            ordinary(process_group=self._replica_group)
        mine = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state_of(metric))
        for name, value in tell_all(mine, engine.group, source).items():
            setattr(metric, name, tree_map_only(torch.Tensor, lambda tensor: tensor.to(engine.device), value))


class EarlierRuns:
    """Takes back what runs that do not end the step do to metrics, as one that counts samples before the model.

    Args:
        metrics: The metrics.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._changes = False

    @contextmanager
    def of(self, index: int) -> Iterator[None]:
        """Let a run on the microbatch of an index leave metrics as they are.

        Steps do the same to metrics for all microbatches, so that copies are only taken for those that are changed.
        """
        if index and not self._changes:
            yield
            return
        before = self._now()
        try:
            yield
        finally:
            self._put_back(before)

    @contextmanager
    def undone_if_it_fails(self) -> Iterator[None]:
        """Leave metrics as they were if a run fails: it is tried in another way."""
        before = self._now()
        try:
            yield
        except BaseException:
            self._put_back(before)
            raise

    def _now(self) -> list[tuple[Metric, dict[str, Any], dict[str, Any]]]:
        return [(metric, dict(vars(metric)), _copied(state_of(metric))) for metric in self._metrics]

    def _put_back(self, before: list[tuple[Metric, dict[str, Any], dict[str, Any]]]) -> None:
        for metric, attributes, state in before:
            now = vars(metric)
            if len(now) != len(attributes) or any(now.get(name) is not it for name, it in attributes.items()):
                self._changes = True
                now.clear()
                now.update(attributes | state)


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.copy() if isinstance(value, list) else value.detach().clone() for name, value in state.items()}


def place_of(owner: nn.Module, metric: Metric, *, anywhere: bool) -> MetricPlace | None:
    """Where `owner` holds `metric`, so that other ranks find theirs; None if it does not.

    Args:
        owner: The user's module.
        metric: The metric.
        anywhere: Whether containers, objects and variables that `owner` reaches count too.
    """
    found = _place_in({(): owner}, metric)
    return _place_in(Places(owner).modules, metric) if found is None and anywhere else found


class SaidOfAll:
    """What metrics that a run updates say then, of all that they were told.

    Args:
        owner: The module that holds them.
        metrics: The metrics.
    """

    def __init__(self, owner: nn.Module, metrics: Sequence[Metric]) -> None:
        self._owner = owner
        self._before = [(metric, updates_of(metric)) for metric in metrics]

    def values(self) -> dict[str, torch.Tensor]:
        """The values that are tensors, by place; what a metric cannot compute is left out."""
        found = {}
        for metric, number in self._before:
            if updates_of(metric) == number or (place := place_of(self._owner, metric, anywhere=True)) is None:
                continue
            root, name = place
            try:
                with left_as_it_is(metric):
                    value = computed_of(metric, is_of_batch=False)
            except Exception:  # it may need more samples, or what is not installed
                continue
            if value is not None:
                holder = named(root) if root else "self"
                found[f"what {holder}.{name} computes" if name else f"what {holder} computes"] = value
        return found


def metric_at(owner: nn.Module, place: MetricPlace) -> Metric:
    """The metric at a place that `place_of` returned, on this rank or another."""
    root, path = place
    holder = Places(owner).modules[root] if root else owner
    return cast("Metric", holder.get_submodule(path))


def _place_in(holders: Mapping[Path, nn.Module], metric: Metric) -> MetricPlace | None:
    within = ((root, path, module) for root, holder in holders.items() for path, module in holder.named_modules())
    return next(((root, path) for root, path, module in within if module is metric), None)
