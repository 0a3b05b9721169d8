"""Metrics that are told something once for a batch, when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_pfo.strategy.model.reach.metric_objects import kept_by_metric
from lightning_pfo.strategy.model.reach.places import LEFT_ALONE, named
from lightning_pfo.strategy.model.reach.untouched import attributes_untouched

MetricPlace = tuple[tuple[Any, ...], str]
"""How a module outside of the model is reached (nothing: it is the user's module), and the metric's name in that."""


@dataclass(frozen=True)
class ToldMetric:
    """A metric that is told something once for a batch; the same one in each microbatch.

    Attributes:
        place: Where it is, so that other ranks find theirs.
        metric: The one of this rank.
        is_of_user: Whether it is of a class of the user's own.
    """

    place: MetricPlace
    metric: Any = field(compare=False, repr=False)
    is_of_user: bool = False

    def __str__(self) -> str:
        root, name = self.place
        return f"{named(root)}.{name}".rstrip(".") if root else name


@contextmanager
def states_alone(metric: nn.Module) -> Iterator[None]:
    """Let what a metric is told change nothing else of it: what it has in other attributes is put back.

    These are put together from what microbatches leave, as other attributes are, on every rank.
    """
    attributes = vars(metric)
    kept = kept_by_metric(metric) | LEFT_ALONE
    others = SimpleNamespace(**{name: value for name, value in attributes.items() if name not in kept})
    with attributes_untouched(others):
        yield
    for name in attributes.keys() - kept - vars(others).keys():
        del attributes[name]
    attributes.update(vars(others))
