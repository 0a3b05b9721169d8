"""All that the package uses of torchmetrics although it is not public; see `strategy.compat`.

torchmetrics itself is not imported here: that takes seconds, and metrics are met only where users have imported it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.compat import needs_whole_batches
from lightning_pfo.strategy.step.effects.outward.told import states_alone

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

SEEN_IN = "torchmetrics 1.9"
PRIVATE = {
    "torchmetrics.Metric._sync_dist": (
        "A metric would reduce over all processes, of which most have never updated it; `dist_sync_fn` gathers "
        "tensors one by one and cannot say that one rank alone counts."
    ),
    "torchmetrics.Metric._wrap_compute": (
        "Metrics that are made or copied in hooks would return on most ranks what they computed before the last batch."
    ),
    "torchmetrics.Metric._defaults": "The names of a metric's states would not be known.",
    "torchmetrics.Metric._to_sync": "A metric that a step computes would wait for ranks that do not run the step.",
    "torchmetrics.Metric._reductions": (
        "What a metric says of a batch would be the mean of what it says of microbatches."
    ),
    "torchmetrics.Metric._forward_cache": "`self.log` of a metric would show nothing on step on most ranks.",
    "torchmetrics.Metric._computed": "A metric would return what it computed before the last batch.",
    "torchmetrics.Metric._update_count": (
        "A metric would warn on most ranks that it was computed before it was updated."
    ),
    "torchmetrics.Metric._is_synced": (
        "A metric whose `compute` raises, which a hook may catch, could not be updated or computed any more."
    ),
    "torchmetrics.MetricCollection._enable_compute_groups": (
        "Metrics that are alike would be updated by the first microbatch each, by the others as one."
    ),
    "torchmetrics.MetricCollection._groups_checked": "One would let groups that are there already fall apart.",
    "torchmetrics.wrappers.Running._num_vals_seen": "A running mean would take microbatches for batches.",
}
"""Private names, and what they are needed for."""
BATCH_VALUE = "_forward_cache"
"""Where a metric has its value on the last batch."""


def state_of(metric: Metric) -> dict[str, Any]:
    """The states of a metric by name."""
    return {name: getattr(metric, name) for name in metric._defaults}


@dataclass(frozen=True, eq=False)
class Way:
    """How metrics come in line with other processes.

    Attributes:
        synchronise: Does so with the state of a metric; it is given the metric's own way, too.
        count: Says how often a metric was updated, of how often it was here; and whether that is so on all ranks.
    """

    synchronise: Callable[[Metric, Callable[..., None]], None]
    count: Callable[[int], tuple[int, bool]]


_WAYS: list[Way] = []
"""Those of the pipelines that there are; the latest counts."""
_IN_CLASSES = Patches()


def synchronise_by(way: Way, patches: Patches) -> None:
    """Let all metrics of the process come in line with others so, also those that are made or copied later.

    So their class does it: what is put into a metric would be copied with it, and go on to belong to the first.
    """
    if not _WAYS:
        kind: Any = sys.modules["torchmetrics"].Metric  # it is loaded where there are metrics
        synchronise, wrap = kind._sync_dist, kind._wrap_compute

        def in_line(metric: Metric, *args: Any, **kwargs: Any) -> None:
            _WAYS[-1].synchronise(metric, partial(synchronise, metric))

        def wrapped(metric: Metric, compute: Callable[..., Any]) -> Callable[..., Any]:
            return _Counted(metric, wrap(metric, compute))

        _IN_CLASSES.set(kind, "_sync_dist", in_line)
        _IN_CLASSES.set(kind, "_wrap_compute", wrapped)
    _WAYS.append(way)

    def end() -> None:
        _WAYS.remove(way)
        if not _WAYS:
            _IN_CLASSES.close()

    patches.callback(end)


def count_updates_of(metrics: Iterable[Metric], patches: Patches) -> None:
    """Agree how often metrics were updated each time they are computed, of metrics made before others did so."""
    for metric in metrics:
        if not isinstance(metric.compute, _Counted):
            patches.set(metric, "compute", _Counted(metric, metric.compute))


class _Counted:
    """Computes a metric; where it was not updated, it is as where it was.

    It would say so, and return what it computed before while others wait for it.
    """

    def __init__(self, metric: Metric, compute: Callable[..., Any]) -> None:
        self._metric, self._compute = metric, compute

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        metric = self._metric
        if not (_WAYS and metric._to_sync):
            return self._compute(*args, **kwargs)
        here = metric._update_count
        metric._update_count, is_everywhere = _WAYS[-1].count(here)
        metric._computed = None
        was_synced = metric._is_synced
        try:
            return self._compute(*args, **kwargs)
        except BaseException:
            if metric._is_synced and not was_synced:  # torchmetrics leaves it so
                metric.unsync()
            raise
        finally:
            if not is_everywhere:
                metric._update_count = here


@contextmanager
def without_synchronisation(metrics: Iterable[Metric]) -> Iterator[None]:
    """Compute metrics from this rank's state only: inside a step the other ranks do not take part."""
    metrics = list(metrics)
    before = [metric._to_sync for metric in metrics]
    for metric in metrics:
        metric._to_sync = False
    try:
        yield
    finally:
        for metric, value in zip(metrics, before, strict=True):
            metric._to_sync = value


def batch_value(metric: Metric) -> torch.Tensor | None:
    """The value of a metric on the last batch; None if it has none, or is no tensor."""
    value = metric._forward_cache
    return value if isinstance(value, torch.Tensor) else None


def latest_computed(metric: Metric) -> torch.Tensor | None:
    """What a metric has computed since it was told something; None if nobody has asked, or it is no tensor."""
    value = metric._computed
    return value if isinstance(value, torch.Tensor) else None


def set_batch_value(metric: Metric, value: torch.Tensor | None) -> None:
    """Let `metric` know its value on the last batch, if any, and that it was updated, on ranks where it was not."""
    metric._forward_cache = value  # type: ignore[assignment]
    metric._computed = None
    if not isinstance(metric, sys.modules["torchmetrics"].wrappers.Running):  # its windows count, on all ranks
        metric._update_count = max(metric._update_count, 1)


def windows_go_on(told: Iterable[tuple[Any, str]]) -> None:
    """Let windows stand here where they stand on the rank that was told of a batch: a step that computes one goes on.

    Args:
        told: Metrics, and the methods that the batch has called there.
    """
    for metric, method in told:
        if isinstance(metric, sys.modules["torchmetrics"].wrappers.Running):
            metric._num_vals_seen = 0 if method == "reset" else metric._num_vals_seen + 1


def said_of(metric: Metric, value: Any) -> str:
    """Whether a value that is logged is what a metric says of the last `batch`, or of `all`; nothing if it is neither.

    A metric object is logged for what it says of the last batch.
    """
    if metric._forward_cache is not None and (value is metric or value is metric._forward_cache):
        return "batch"
    return "all" if value is not None and value is metric._computed else ""


@contextmanager
def noting_states(
    metric: Metric, note: Callable[[Metric, dict[str, Any]], None], *, may_lack_samples: bool
) -> Iterator[None]:
    """Let `note` hear of the states of what a metric is called with alone, each time it is called.

    Where it `may_lack_samples`, as a microbatch of one of which there is no variance, it says NaN instead of failing.
    """
    attributes, forward = vars(metric), metric.forward
    before = attributes.get("forward")

    def noted(*args: Any, **kwargs: Any) -> Any:
        compute, states = metric.compute, dict[str, Any]()

        def of_these(*args: Any, **kwargs: Any) -> Any:  # torchmetrics computes what it returns from these alone
            states.update({name: list(v) if isinstance(v, list) else v for name, v in state_of(metric).items()})
            try:
                return compute(*args, **kwargs)
            except Exception:  # what the batch comes to is computed from all states
                if not may_lack_samples:
                    raise
                return torch.tensor(math.nan)

        attributes["compute"] = of_these
        try:
            result = forward(*args, **kwargs)
        finally:
            attributes["compute"] = compute
        note(metric, states)
        return result

    attributes["forward"] = noted
    try:
        yield
    finally:
        if before is None:
            attributes.pop("forward", None)
        else:
            attributes["forward"] = before


def value_of_states(metric: Metric, states: Sequence[dict[str, Any]]) -> torch.Tensor | None:
    """What a metric says of several states together, which it keeps; None if that is no tensor.

    They are put together as torchmetrics does it with those of several processes.
    """
    reductions: Mapping[str, Any] = metric._reductions
    for name, reduction in reductions.items():
        values = [state[name] for state in states]
        is_list = isinstance(values[0], list)
        together = [item for value in values for item in value] if is_list else torch.stack(values)
        vars(metric)[name] = together if reduction is None else reduction(together)
    metric._update_count, metric._computed = len(states), None
    return computed_of(metric, is_of_batch=False)


def updates_of(metric: Metric) -> int:
    """How often a metric was updated."""
    return metric._update_count


def computed_of(metric: Metric, *, is_of_batch: bool) -> torch.Tensor | None:
    """What a metric says of the batch that it was called with last, or of all; None if it is no tensor.

    Where other ranks do not ask, too, it is asked where it is `left_as_it_is`.
    """
    value = metric._forward_cache if is_of_batch else metric.compute()
    return value if isinstance(value, torch.Tensor) else None


_PROGRESS = ("_update_count", "_computed", "_num_vals_seen")


def progress_of(metric: Metric) -> dict[str, Any]:
    """What a metric has come to: its states, and how often it was updated."""
    states = {name: v.clone() if isinstance(v, torch.Tensor) else list(v) for name, v in state_of(metric).items()}
    attributes = vars(metric)
    return states | {name: attributes[name] for name in _PROGRESS if name in attributes}


@contextmanager
def left_as_it_is(metric: Metric) -> Iterator[None]:
    """Let a metric, and those within it, be told things that do not count, on this rank alone."""
    kind = sys.modules["torchmetrics"].Metric
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    stack = ExitStack()
    for each in metric.modules():
        if isinstance(each, kind):
            if not type(each).__module__.startswith("torchmetrics."):
                stack.enter_context(states_alone(each))
            attributes, copies = vars(each), progress_of(each)
            alone = dict.fromkeys(("_to_sync", "sync_on_compute", "dist_sync_on_step"), False)
            # who writes into a state finds the same one
            before.append((attributes, {name: attributes[name] for name in (*copies, *alone, BATCH_VALUE)}))
            attributes.update(copies | alone)
    try:
        yield
    finally:
        stack.close()
        for attributes, values in before:
            attributes.update(values)


def put_back(metric: Metric, progress: dict[str, Any]) -> None:
    """Let a metric have come to what it had."""
    vars(metric).update(progress)


def note_changes(metric: Metric, note: Callable[[str, Any, Any], None], patches: Patches) -> None:
    """Let `note` hear of what changes a metric: `update` (also by a call of the metric) and `reset`, with arguments.

    A call puts states together with those before by reductions, which may come to something else than `update`; it is
    told as such then, but where it waits for other processes.
    """
    update, forward, reset = metric.update, metric.forward, metric.reset
    called = "forward" if needs_whole_batches(metric) and not metric.dist_sync_on_step else "update"
    is_within = False

    def noted(method: str, ordinary: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal is_within
        if is_within or getattr(ordinary, "__self__", metric) is not metric:  # of a copy of the metric
            return ordinary(*args, **kwargs)
        is_within = True
        try:
            result = ordinary(*args, **kwargs)
        finally:
            is_within = False
        note(method, args, kwargs)
        return result

    patches.set(metric, "update", partial(noted, "update", update))
    patches.set(metric, "forward", partial(noted, called, forward))
    patches.set(metric, "reset", partial(noted, "reset", reset))


def update_each(collection: MetricCollection, patches: Patches) -> None:
    """Let a collection update each of its metrics, also those that are alike, unless the user says which are."""
    if collection._enable_compute_groups is True and not collection._groups_checked:
        patches.set(collection, "_enable_compute_groups", False)
