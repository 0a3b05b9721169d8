"""Sharing what a step logged and returned: only the last stage knows, every rank needs it.

One all-reduce per step carries all numbers, which stay on the device; the structure (names and arguments of `self.log`)
is sent only when it changes. The all-reduce is also where devices wait for the slowest, so that an iteration ends at
the same time everywhere. Whether the structure changed, or the step failed, is agreed between the hosts: they need not
wait for their devices, which may be far behind. Where the device is the host, the same all-reduce says it.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_pfo.core.errors import PfoError
from lightning_pfo.strategy.parallel.groups import global_rank


@dataclass
class StepValues:
    """What the last stage knows after a step.

    Attributes:
        numbers: 0-dimensional tensors or Python numbers; tensors on `device` after sharing.
        structure: Anything picklable that says what the numbers mean.
        error: The error that the user's code raised on the last stage, if it did.
    """

    numbers: list[Any] = field(default_factory=list)
    structure: Any = None
    error: BaseException | None = None


class StepFailedError(PfoError, RuntimeError):
    """The user's step raised an error on another rank."""


class ValueExchange:
    """Sends `StepValues` from the rank of the last stage to all; one object for each kind of step.

    Args:
        device: Where shared numbers live.
        group: The pipeline's process group.
        hosts: A group of the same processes for tensors on the CPU; see `host_group`.
        last_rank: The rank of the last stage.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        hosts: dist.ProcessGroup | None,
        last_rank: int,
    ) -> None:
        self._device = device
        self._group = group
        self._hosts = hosts
        self._last_rank = last_rank
        self._known: tuple[Any, int] = (None, 0)

    def share(self, values: StepValues | None) -> StepValues:
        """Exchange the values of one step; a collective call.

        Args:
            values: On the rank of the last stage what it knows; None on all others.

        Returns:
            The same values on every rank.

        Raises:
            BaseException: On the rank of the last stage the error in `values`; on the others a `StepFailedError` that
                quotes it.
        """
        structure, count = self._known
        is_new = values is not None and (
            values.error is not None or (values.structure, len(values.numbers)) != self._known
        )
        if self._device.type != "cpu" and self._agree_between_hosts(is_new):
            return self._share_all(values)
        # float64 holds losses and counts exactly
        packed = torch.zeros(1 + count, dtype=torch.float64, device=self._device)
        if is_new:
            packed[0] = 1
        elif values is not None and count:
            packed[1:] = torch.stack([torch.as_tensor(n, dtype=torch.float64).to(self._device) for n in values.numbers])
        dist.all_reduce(packed, group=self._group)
        if self._device.type == "cpu" and packed[0]:
            return self._share_all(values)
        return StepValues(list(packed[1:].to(torch.get_default_dtype()).unbind()), structure)

    def _agree_between_hosts(self, is_new: bool) -> bool:
        flag = torch.tensor([is_new], dtype=torch.uint8)
        dist.broadcast(flag, src=global_rank(self._group, self._last_rank), group=self._hosts)
        return bool(flag)

    def _share_all(self, values: StepValues | None) -> StepValues:
        message: list[Any] = [None]
        if values is not None:
            numbers = [float(n) for n in values.numbers]
            text = "".join(traceback.format_exception(values.error)) if values.error is not None else ""
            message = [(values.structure, numbers, text)]
        dist.broadcast_object_list(message, src=global_rank(self._group, self._last_rank), group=self._group)
        structure, numbers, text = message[0]
        if text:
            if values is not None and values.error is not None:
                raise values.error
            raise StepFailedError(f"The step failed on rank {self._last_rank}, which runs the last stage:\n{text}")
        self._known = (structure, len(numbers))
        shared = torch.tensor(numbers, dtype=torch.get_default_dtype(), device=self._device)
        return StepValues(list(shared.unbind()), structure)
