"""torchmetrics objects in pipelined steps: updated on the rank of the last stage, computed everywhere.

Only the last stage runs whole steps, so only its rank's copies of the metrics are updated. Whenever a metric is
computed on all ranks (Lightning does so at the end of an epoch), its state is taken from there, not reduced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import TypeIs

from lightning_pfo.strategy.parallel.compat import tree_map_only
from lightning_pfo.strategy.parallel.groups import tell_all
from lightning_pfo.strategy.parallel.patches import Patches
from lightning_pfo.strategy.step.effects.within import step_ends_here, within_step
from lightning_pfo.strategy.step.metrics.compat import count_updates_with, state_of, synchronise_with

if TYPE_CHECKING:
    from torchmetrics import Metric


def is_metric(value: Any) -> TypeIs[Metric]:
    """Whether it is a metric object. Never where torchmetrics has not been imported; we do not, it takes seconds."""
    torchmetrics = sys.modules.get("torchmetrics")
    # of a class that it has not seen, `isinstance` would ask each of the hundred kinds of metrics
    return torchmetrics is not None and torchmetrics.Metric in type(value).__mro__


def metrics_of(owner: nn.Module) -> list[Metric]:
    """All metric objects of a module."""
    return [module for module in owner.modules() if is_metric(module)]


def take_state_from(
    metric: Metric,
    source_rank: int,
    device: torch.device,
    group: dist.ProcessGroup | None,
    replica_group: dist.ProcessGroup | None,
    patches: Patches,
) -> None:
    """Let `metric` take the state of `source_rank` of its pipeline, reduced over replicas, not that of all ranks.

    Args:
        metric: The metric.
        source_rank: The rank in `group` that updates it.
        device: Where its state lives.
        group: The pipeline's process group.
        replica_group: The processes with the same stages; None where there is one replica.
        patches: Gives the metric back when it is closed.
    """

    def take(ordinary: Callable[..., None]) -> None:
        if within_step():  # which this rank alone may run
            if replica_group is not None and step_ends_here():
                ordinary(process_group=replica_group)
            return
        if replica_group is not None and dist.get_rank(group) == source_rank:
            ordinary(process_group=replica_group)
        _take_state(metric, source_rank, device, group)

    def count_from_there(num_updates: int) -> int:
        return num_updates if within_step() else int(tell_all(num_updates, group, source_rank))

    synchronise_with(metric, take, patches)
    count_updates_with(metric, count_from_there, patches)


def _take_state(metric: Metric, source_rank: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
    mine = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), state_of(metric))
    for name, value in tell_all(mine, group, source_rank).items():
        setattr(metric, name, tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), value))


def path_of(owner: nn.Module, metric: Metric) -> str:
    """The dotted name under which `owner` holds `metric`; empty if it does not."""
    return next((path for path, module in owner.named_modules() if module is metric), "")
