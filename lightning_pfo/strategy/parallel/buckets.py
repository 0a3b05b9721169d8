"""Means of gradients over replicas, in buckets that are under way while the pipeline goes on.

A bucket takes the place of its gradients: they are copied into it and let go of, one bucket at a time, so that there
never is a second copy of all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.strategy.parallel.dtensor import from_local, is_divided_over, local, placed_like
from lightning_pfo.strategy.parallel.reductions import Gradients, dense, gradient_type, hand_out, kind_of, of_kind

BUCKET_BYTES = 32 << 20


@dataclass(frozen=True)
class _Bucket:
    """Gradients that are reduced together.

    Attributes:
        parameters: Whose they are.
        flat: Their elements in a row.
        kinds: Of each parameter, the kind of its gradient; see `kind_of`.
        works: What to wait for.
    """

    parameters: Sequence[nn.Parameter]
    flat: torch.Tensor
    kinds: torch.Tensor
    works: Sequence[dist.Work | None]


class ReplicaMeans:
    """Averages gradients over replicas, all of which begin with the same parameters in the same order.

    Parameters that FSDP2 divides over the replicas are left alone: it averages them itself.

    Args:
        group: The replicas.
        hosts: The same processes for tensors on the CPU, see `Groups.hosts`.
        precise: Whether gradients in 16 bits are added up in 32.
        bucket_bytes: How much is reduced together, if no gradient is larger.

    Attributes:
        hosts: The same.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hosts: dist.ProcessGroup | None,
        *,
        precise: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._group = group
        self.hosts = hosts
        self._precise = precise
        self._bucket_bytes = bucket_bytes
        self._under_way: list[_Bucket] = []

    def start(self, parameters: Iterable[nn.Parameter], gradients: Gradients) -> None:
        """Begin with some parameters, whose gradients are taken out of `gradients`; does not wait for others."""
        for bucket in self._divide(self._averaged(parameters)):
            self._under_way.append(self._start(bucket, [gradients.pop(parameter, None) for parameter in bucket]))

    def finish(self, gradients: Gradients) -> None:
        """Wait for all that was begun, and put the means into `gradients`, but of parameters that no replica used."""
        for bucket in self._under_way:
            for work in bucket.works:
                assert work is not None
                work.wait()
            pieces = bucket.flat.split([local(p).numel() for p in bucket.parameters])  # type: ignore[no-untyped-call]
            for parameter, piece, kind in zip(bucket.parameters, pieces, bucket.kinds.tolist(), strict=True):
                if kind:
                    mean = _in_form_of(local(parameter), piece)
                    gradients[parameter] = of_kind(from_local(mean, parameter), kind)
        self._under_way.clear()

    def forget(self) -> None:
        """Let go of what was begun, after an error; all replicas have one."""
        self._under_way.clear()

    def average(self, parameters: Sequence[nn.Parameter]) -> None:
        """Replace the gradients of parameters by their means; a collective call."""
        gradients = {p: placed_like(p.grad, p) for p in parameters if p.grad is not None}
        for parameter in parameters:
            parameter.grad = None
        self.start(parameters, gradients)
        self.finish(gradients)
        hand_out(gradients)

    def largest_bucket_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """What a bucket of parameters takes while its gradients are copied into it; several are not copied at once."""
        buckets = [bucket for bucket in self._divide(self._averaged(parameters)) if len(bucket) > 1]
        sizes = [gradient_type(bucket[0], precise=self._precise).itemsize for bucket in buckets]
        elements = [sum(local(parameter).numel() for parameter in bucket) for bucket in buckets]
        return max(map(mul, sizes, elements), default=0)

    @staticmethod
    def _averaged(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        return [p for p in parameters if p.requires_grad and not is_divided_over(p, "data_parallel")]

    def _divide(self, parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        by_type: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            by_type.setdefault(gradient_type(parameter, precise=self._precise), []).append(parameter)
        for dtype, of_type in by_type.items():
            bucket: list[nn.Parameter] = []
            num_bytes = 0
            for parameter in of_type:
                of_this = local(parameter).numel() * dtype.itemsize
                if bucket and num_bytes + of_this > self._bucket_bytes:
                    yield bucket
                    bucket, num_bytes = [], 0
                bucket.append(parameter)
                num_bytes += of_this
            yield bucket

    def _start(self, parameters: Sequence[nn.Parameter], gradients: list[torch.Tensor | None]) -> _Bucket:
        dtype = gradient_type(parameters[0], precise=self._precise)
        kinds = torch.tensor(list(map(kind_of, gradients)), dtype=torch.int32)
        rows = [
            local(parameter).new_zeros(local(parameter).numel(), dtype=dtype)
            if gradient is None
            else _in_a_row(dense(local(gradient)).to(dtype), local(parameter))
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        flat /= dist.get_world_size(self._group)  # before the sum, which could overflow in 16 bits
        works = (
            dist.all_reduce(flat, group=self._group, async_op=True),
            dist.all_reduce(kinds, dist.ReduceOp.MAX, group=self.hosts, async_op=True),
        )
        return _Bucket(parameters, flat, kinds, works)


def _is_dense(form: torch.Tensor) -> bool:
    """Whether the elements fill their memory, in whatever order; those of channels-last weights do."""
    return form.numel() == 1 + sum((size - 1) * stride for size, stride in zip(form.shape, form.stride(), strict=True))


def _in_a_row(tensor: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor in the order in which `form` has them in memory; shares memory where it can."""
    if not _is_dense(form):
        return tensor.reshape(-1)
    if tensor.stride() != form.stride():
        tensor = tensor.new_empty_strided(form.shape, form.stride()).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def _in_form_of(form: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """The inverse of `_in_a_row`."""
    return row.as_strided(form.shape, form.stride()) if _is_dense(form) else row.view(form.shape)
