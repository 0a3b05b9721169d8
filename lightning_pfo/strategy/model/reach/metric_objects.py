"""What metric objects of a user's own classes keep as those of torchmetrics do, which is not put together."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any


def kept_by_metric(module: Any) -> frozenset[str]:
    """Names of a metric's states, and of what torchmetrics keeps in each; nothing of other modules.

    They go on from microbatch to microbatch, of which a metric is told one after the other. What else it has is put
    together as other attributes are; so are states that are lists, which have an item for each batch then, everywhere.
    """
    torchmetrics = sys.modules.get("torchmetrics")  # where it is not imported there are no metrics
    if torchmetrics is None or torchmetrics.Metric not in type(module).__mro__:
        return frozenset()
    states = module.metric_state.items()
    names = {name for name, value in states if not isinstance(value, list)}
    return _kept_by_all(torchmetrics.SumMetric) | names


@cache
def _kept_by_all(kind: Any) -> frozenset[str]:
    metric = kind()
    return frozenset(vars(metric)).difference(metric.metric_state)
