"""torchmetrics objects in pipelined steps: updated on the rank of the last stage, computed everywhere.

Only the last stage runs whole steps, so only its rank's copies of the metrics are updated. Whenever a metric is
computed on all ranks (Lightning does so at the end of an epoch), its state is taken from there, not reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only
from typing_extensions import TypeIs

from lightning_pfo.strategy.parallel.groups import global_rank

if TYPE_CHECKING:
    from torchmetrics import Metric


def is_metric(value: Any) -> TypeIs[Metric]:
    """Whether it is a metric object. Never where torchmetrics has not been imported; we do not, it takes seconds."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(value, torchmetrics.Metric)


def metrics_of(owner: nn.Module) -> list[Metric]:
    """All metric objects of a module."""
    return [module for module in owner.modules() if is_metric(module)]


def take_state_from(
    metric: Metric,
    source_rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
) -> None:
    """Let `metric` take the state of `source_rank` of its pipeline, reduced over replicas, not that of all ranks.

    Args:
        metric: The metric.
        source_rank: The rank in `group` that updates it.
        device: Where its state lives.
        group: The pipeline's process group.
        replica_group: The processes with the same stages; None where there is one replica.
    """
    reduce = partial(type(metric)._sync_dist, metric) if replica_group is not None else None

    def take(*args: Any, **kwargs: Any) -> None:
        if reduce is not None and dist.get_rank(group) == source_rank:
            reduce(process_group=replica_group)
        _take_state(metric, source_rank, device, group)

    metric._sync_dist = take  # type: ignore[method-assign]


def _take_state(metric: Metric, source_rank: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    state = {name: getattr(metric, name) for name in metric._defaults}
    message: list[Any] = [tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state)]
    dist.broadcast_object_list(message, src=global_rank(group, source_rank), group=group)
    for name, value in message[0].items():
        setattr(metric, name, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value))


@contextmanager
def without_synchronisation(metrics: list[Metric]) -> Iterator[None]:
    """Compute metrics from this rank's state only: inside a step the other ranks do not take part."""
    before = [metric._to_sync for metric in metrics]
    for metric in metrics:
        metric._to_sync = False
    try:
        yield
    finally:
        for metric, value in zip(metrics, before, strict=True):
            metric._to_sync = value


def path_of(owner: nn.Module, metric: Metric) -> str:
    """The dotted name under which `owner` holds `metric`; empty if it does not."""
    return next((path for path, module in owner.named_modules() if module is metric), "")


def set_batch_value(metric: Metric, value: torch.Tensor) -> None:
    """Let `metric` know its value on the last batch, and that it was updated, on ranks where it was not."""
    metric._forward_cache = value  # type: ignore[assignment]
    metric._computed = None
    metric._update_count = max(metric._update_count, 1)
