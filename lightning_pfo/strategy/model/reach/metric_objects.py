"""Which objects are metrics, and what those of a user's own classes keep as torchmetrics' own do."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import TypeIs

from lightning_pfo.strategy.model.compat import needs_whole_batches

if TYPE_CHECKING:
    from torchmetrics import Metric


def is_metric(value: Any) -> TypeIs[Metric]:
    """Whether it is a metric object. Never where torchmetrics has not been imported; we do not, it takes seconds."""
    torchmetrics = sys.modules.get("torchmetrics")
    # of a class that it has not seen, `isinstance` would ask each of the hundred kinds of metrics
    return torchmetrics is not None and torchmetrics.Metric in type(value).__mro__


def kept_by_metric(module: Any) -> frozenset[str]:
    """Names of a metric's states, and of what torchmetrics keeps in each; nothing of other modules.

    They go on from microbatch to microbatch, of which a metric is told one after the other, or change once for a batch.
    What else it has is put together as other attributes are; so are states that are lists, where it is told of
    microbatches: they have an item for each batch then, everywhere.
    """
    if not is_metric(module):
        return frozenset()
    has_all = needs_whole_batches(module)
    names = {name for name, value in module.metric_state.items() if has_all or not isinstance(value, list)}
    return _kept_by_all(sys.modules["torchmetrics"].SumMetric) | names


@cache
def _kept_by_all(kind: Any) -> frozenset[str]:
    metric = kind()
    return frozenset(vars(metric)).difference(metric.metric_state)
