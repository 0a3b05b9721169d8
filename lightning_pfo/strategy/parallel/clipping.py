"""Clipping gradients whose norm no process knows alone."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.optimizers import clamp_in_place, clip_norms_with, scale_in_place
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel.dtensor import local, num_shards
from lightning_pfo.strategy.parallel.groups import Shared


@dataclass(frozen=True, eq=False)
class Norms:
    """Norms of gradients over all stages, as on a single device.

    A gradient, or a part of one, that several processes hold counts once: each adds its share.

    Attributes:
        parameters: Gives all parameters of the model; of others every rank has an equal one.
        shared: Parameters that several ranks of a pipeline hold with equal gradients.
        device: Where norms are reduced.
        num_ranks: Number of ranks of a pipeline.
        meet: Called with what is computed, by the name that users know, to notice ranks that do something else.
    """

    parameters: Callable[[], Iterable[nn.Parameter]]
    shared: Sequence[Shared]
    device: torch.device
    num_ranks: int
    meet: Callable[[str], object]

    def concern(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether some of these are parameters of the model, held here or elsewhere."""
        return not {id(parameter) for parameter in self.parameters()}.isdisjoint(map(id, tensors))

    def of(self, parameters: Sequence[torch.Tensor], norm_type: float = 2.0, *, called: str) -> torch.Tensor:
        """The norm of the gradients of parameters; a collective call of all processes.

        Args:
            parameters: The same on every rank; placeholders have no gradient here.
            norm_type: Of which norm; infinity is the largest element.
            called: What has been called for it.

        Raises:
            ConfigurationError: If there is no such norm over stages.
        """
        if not norm_type > 0:
            raise ConfigurationError(
                f"The norm of gradients over all stages has a norm_type above 0, or inf; got {norm_type:g}."
            )
        self.meet(called)
        is_largest = math.isinf(norm_type)
        total = torch.zeros((), device=self.device, dtype=_summed_in(self.device))
        for copies, gradients in self._by_copies(parameters).items():
            norm = torch.nn.utils.get_total_norm(gradients, norm_type).to(total)
            total = torch.maximum(total, norm) if is_largest else total + norm**norm_type / copies
        dist.all_reduce(total, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM)
        norm = total if is_largest else total ** (1 / norm_type)
        is_double = any(parameter.dtype == torch.float64 for parameter in parameters)  # placeholders too
        return norm.to(torch.float64 if is_double and self.device.type != "mps" else torch.float32)

    def clip(
        self,
        parameters: Sequence[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        *,
        called: str,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scale gradients of parameters down to a norm; a collective call of all processes.

        Args:
            parameters: The same on every rank.
            max_norm: Largest allowed norm of all their gradients together.
            norm_type: Of which norm.
            called: What has been called for it.
            error_if_nonfinite: Whether a norm that is not finite is an error, on every rank.

        Returns:
            The norm before, the same on every rank.

        Raises:
            RuntimeError: If it is not finite, and that is an error.
        """
        norm = self.of(parameters, norm_type, called=called)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} of gradients of all stages is {norm.item()}, so they cannot be "
                f"clipped. To scale them all the same, set error_if_nonfinite=False."
            )
        # lists must not mix plain and divided tensors
        gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        scale_in_place(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _by_copies(self, parameters: Sequence[torch.Tensor]) -> Mapping[float, list[torch.Tensor]]:
        """Gradients by how many processes hold them."""
        num_holders = {id(parameter): 1 for parameter in self.parameters()}
        num_holders |= {id(parameter): len(each.ranks) for each in self.shared for parameter in each.parameters}
        by_copies: dict[float, list[torch.Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                different = num_shards(parameter.grad) * self.num_ranks
                copies = dist.get_world_size() * num_holders.get(id(parameter), self.num_ranks) / different
                by_copies.setdefault(copies, []).append(local(parameter.grad))
        return by_copies


def _summed_in(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


_TOO_EARLY = (
    "A step calls torch.nn.utils.clip_grad_norm_, but the gradients of its batch are there when all microbatches have "
    "run backward. Call it after backward: in a loop of your own, or a hook such as on_before_optimizer_step, where "
    "gradient_clip_val of the Trainer does it too."
)
_of_pipelines: list[tuple[weakref.ref[Norms], Callable[[], bool]]] = []
"""Norms of models that are pipelines now, none of which is kept alive by it, and whether a step is under way."""


def clip_for_torch(norms: Norms, within_step: Callable[[], bool], patches: Patches) -> None:
    """Let `torch.nn.utils.clip_grad_norm_` clip gradients of a model by the norm over all stages.

    Hooks and loops run on every rank alike, so they may. In a step it is refused: gradients are not there yet.

    Args:
        norms: Those of the model.
        within_step: Whether a step is under way.
        patches: When it is closed, torch's function is its own again.
    """
    entry = weakref.ref(norms), within_step

    def forget() -> None:
        _of_pipelines.remove(entry)
        if not _of_pipelines:
            clip_norms_with(None)

    _of_pipelines.append(entry)
    patches.callback(forget)
    clip_norms_with(_clip)


def _clip(
    ordinary: Callable[..., torch.Tensor],
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    if not isinstance(parameters, (torch.Tensor, Sequence)):
        parameters = list(parameters)
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    for of_pipeline, within_step in _of_pipelines:
        norms = of_pipeline()
        if norms is not None and norms.concern(given):
            called = "torch.nn.utils.clip_grad_norm_"
            if within_step():
                _ = [parameter.grad for parameter in given]  # steps that optimize by themselves are told more
                raise ConfigurationError(_TOO_EARLY)
            return norms.clip(
                given, float(max_norm), float(norm_type), called=called, error_if_nonfinite=error_if_nonfinite
            )
    return ordinary(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def clip_by_value(parameters: Sequence[nn.Parameter], max_value: float) -> None:
    """Limit every element of the gradients to `-max_value` .. `max_value`; each process does its part."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        clamp_in_place(gradients, max_value)
