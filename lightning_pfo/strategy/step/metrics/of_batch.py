"""What metric objects say of a batch where a step logs it: `log("f1", self.f1)`, `log("sum", self.sum.compute())`.

A metric says it of each microbatch, and of a sum, a largest value or an F1 score what these say is no mean of the
batch's. So the states that it has of each microbatch alone are noted, and merged as torchmetrics merges those of
processes. What aggregators say follows from what they are told of the batch; see `aggregators`. Of what a step makes of
it (`self.correct.compute() / self.seen.compute()`, `self.seen.compute().item()`) see `totals`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.model.reach.places import Path
from lightning_pfo.strategy.model.tracing.tracked import following, plain
from lightning_pfo.strategy.step.effects.outward.calls import is_of_metric
from lightning_pfo.strategy.step.effects.outward.noted import Call
from lightning_pfo.strategy.step.metrics.aggregators import Aggregators
from lightning_pfo.strategy.step.metrics.compat import (
    batch_value,
    computed_of,
    latest_computed,
    left_as_it_is,
    noting_states,
    said_of,
    updates_of,
    value_of_states,
)
from lightning_pfo.strategy.step.metrics.totals import Count

if TYPE_CHECKING:
    from torchmetrics import Metric

Key = tuple[str, int]
"""A name that is logged, and how often the step had logged it before."""


class _Said(NamedTuple):
    """What a metric has said.

    Attributes:
        metric: Which metric it is, by its id.
        nth: How often the microbatch had called it.
        is_of_batch: Whether it says that of the batch alone; else of all that it was told.
    """

    metric: int
    nth: int
    is_of_batch: bool


class SaidOfBatch:
    """What metrics have said in the microbatches of a batch, where the step is run to its end."""

    def __init__(self) -> None:
        self._metrics: dict[int, Metric] = {}
        self._told: Counter[int] = Counter()
        self._once: frozenset[int] = frozenset()
        self._states: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._logged: dict[Key, list[_Said]] = {}
        self._said: dict[_Said, list[torch.Tensor]] = {}

    @contextmanager
    def of_microbatch(self, metrics: Iterable[Metric], aggregators: Aggregators, *, is_part: bool) -> Iterator[None]:
        """Note what metrics say of a microbatch while the context is open.

        Args:
            metrics: The metrics.
            aggregators: Those of them that are told once for a batch.
            is_part: Whether the batch has others too.
        """
        self._metrics = {id(metric): metric for metric in metrics}
        self._told, self._once = aggregators.told, aggregators.ids
        self._told.clear()
        before = {known: batch_value(metric) for known, metric in self._metrics.items()}
        with ExitStack() as stack:
            for metric in metrics:
                if id(metric) not in self._once:
                    stack.enter_context(noting_states(metric, self._note, may_lack_samples=is_part))
            yield
        for known, nth in self._told.items():  # others say what they said before the batch
            of_batch, of_all = batch_value(self._metrics[known]), latest_computed(self._metrics[known])
            if of_batch is not None and of_batch is not before[known]:
                self._take(_Said(known, nth, True), of_batch)
            if of_all is not None and known in self._once:  # others go on from microbatch to microbatch
                self._take(_Said(known, nth, False), of_all)

    def _take(self, said: _Said, value: torch.Tensor) -> None:
        with following(None):
            self._said.setdefault(said, []).append(plain(value).detach().clone())  # it may be a state

    def _note(self, metric: Metric, states: dict[str, Any]) -> None:
        with following(None):
            alone = tree_map_only(torch.Tensor, torch.Tensor.detach, plain(states))
        self._states.setdefault((id(metric), self._told[id(metric)]), []).append(alone)
        self._told[id(metric)] += 1

    def logs(self, key: Key, value: Any) -> None:
        """The step logs a metric object, or a value that one may have said."""
        for known, metric in self._metrics.items():
            said = said_of(metric, value)
            if said == "batch" or (said == "all" and known in self._once):  # others go on from microbatch to microbatch
                self._logged.setdefault(key, []).append(_Said(known, self._told[known], said == "batch"))
                return

    def value(self, key: Key, number: int, calls: Sequence[Call]) -> torch.Tensor | None:
        """What a metric says of the batch; None where the step has logged something else, or nobody knows.

        Args:
            key: Where it was logged.
            number: In how many microbatches.
            calls: What the batch tells aggregators.
        """
        found = self._logged.get(key, [])
        if len(found) != number or len(set(found)) != 1 or number == 1:
            return None
        return self._of_batch(found[0], calls)

    def counts(self, number: int, calls: Sequence[Call]) -> dict[Path, Count]:
        """What metrics have said in all microbatches, of which the step may have made other numbers.

        Args:
            number: How many microbatches there are.
            calls: What the batch tells aggregators.
        """
        return {
            ("said by metrics", *said): Count(partial(self._before, said), values, partial(self._of_batch, said, calls))
            for said, values in self._said.items()
            if len(values) == number > 1
        }

    def _before(self, said: _Said) -> torch.Tensor | None:
        """What a metric says before the batch; of the batch alone it says nothing."""
        metric = self._metrics[said.metric]
        if said.is_of_batch or not updates_of(metric):
            return torch.zeros(())
        with left_as_it_is(metric):
            return computed_of(metric, is_of_batch=False)

    def _of_batch(self, said: _Said, calls: Sequence[Call]) -> torch.Tensor | None:
        known, nth, is_of_batch = said
        metric = self._metrics[known]
        if metric.dist_sync_on_step:  # it says what replicas come to, all of which are here in the step only
            return None
        try:
            with left_as_it_is(metric):
                if known not in self._once:
                    return value_of_states(metric, self._states[known, nth - 1])
                of_metric = [call for call in calls if is_of_metric(call) and call[0][0][1].metric is metric][:nth]
                for number, ((_, (_, method), *_), args, kwargs) in enumerate(of_metric, start=1):
                    is_asked = is_of_batch and number == nth  # `update` says nothing
                    getattr(metric, "forward" if is_asked else method)(*args, **kwargs)
                return computed_of(metric, is_of_batch=is_of_batch)
        except Exception:  # states that nobody can merge: the comparison with one device tells of what is logged then
            return None
