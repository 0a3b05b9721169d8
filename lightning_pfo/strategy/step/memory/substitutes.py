"""A module whose parameters and buffers have no values, so that what it computes takes no memory and little time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_pfo.strategy.compat.modules import modules_of, tensors_of
from lightning_pfo.strategy.compat.tensors import WithoutValues, tree_map_only
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel.dtensor import from_local, is_divided_over, local
from lightning_pfo.strategy.parallel.holder import Holder

StandIns = dict[torch.Tensor, torch.Tensor]
"""What stands for the tensors of a module."""


class Substitutes(Protocol):
    """Makes what a trial computes with."""

    def like(self, form: torch.Tensor) -> torch.Tensor:
        """A tensor in the form of another."""

    def in_place_of(self, root: nn.Module, units: Iterable[Unit]) -> Any:
        """A context in which a module has other tensors; gives those that stand for its own."""


class OwnValues:
    """The module's own tensors, and zeros for what stages send: for what does not run without values."""

    def like(self, form: torch.Tensor) -> torch.Tensor:
        """Zeros in the form of another tensor."""
        return torch.zeros(form.shape, dtype=form.dtype, device=form.device)

    @contextmanager
    def in_place_of(self, root: nn.Module, units: Iterable[Unit]) -> Iterator[StandIns]:
        """Every tensor stands for itself."""
        tensors: list[torch.Tensor] = [*root.parameters(), *root.buffers()]
        yield {tensor: tensor for tensor in tensors}


class NoValues:
    """Tensors that have no values; what is computed from them has none either.

    What is computed from other tensors alone has values: nothing that follows from a batch is guessed.

    Args:
        precision: Types of layers that are divided over replicas; None: those of their parameters.
    """

    def __init__(self, precision: MixedPrecisionPolicy | None = None) -> None:
        self._mode = WithoutValues(allow_non_fake_inputs=True)
        self._precision = precision

    def like(self, form: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One in the form of another tensor."""
        with self._mode:
            return torch.empty_strided(form.shape, form.stride(), dtype=dtype or form.dtype, device=form.device)

    @contextmanager
    def in_place_of(self, root: nn.Module, units: Iterable[Unit]) -> Iterator[StandIns]:
        """Let a module have tensors without values, and its units run as they are written.

        Args:
            root: The module; placeholders of other ranks' tensors stay.
            units: Its units, some of which may be compiled or divided over replicas.

        Yields:
            What stands for each tensor.
        """
        stand_ins: StandIns = {}
        held = [tensors_of(module) for module in modules_of(root)]
        registries: list[tuple[dict[str, Any], dict[str, Any]]] = []
        registries += [(registry, dict(registry)) for tensors in held for registry in tensors]
        replaced = [(unit, unit.replacement) for unit in units if unit.replacement is not None]
        try:
            for unit, _ in replaced:
                unit.replacement = None
                if self._precision is not None and unit.forward is not None:
                    unit.replacement = Holder(unit.module, partial(_with_types, self._precision, unit.forward))
            for registry, before in registries:
                for name, tensor in before.items():
                    if tensor is not None and not tensor.is_meta:
                        if tensor not in stand_ins:
                            stand_ins[tensor] = self._stand_in(tensor)
                        registry[name] = stand_ins[tensor]
            yield stand_ins
        finally:
            for registry, before in registries:
                registry.update(before)
            for unit, replacement in replaced:
                unit.replacement = replacement

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_divided_over(tensor, "data_parallel"):  # it is whole where it is used
            form = self.like(tensor, None if self._precision is None else self._precision.param_dtype)
        else:
            form = from_local(self.like(local(tensor.detach())), tensor)
        return nn.Parameter(form, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else form


def _with_types(precision: MixedPrecisionPolicy, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer as FSDP2 does."""

    def cast(values: Any, dtype: torch.dtype | None) -> Any:
        def change(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

        return tree_map_only(torch.Tensor, change, values)

    args, kwargs = cast((args, kwargs), precision.param_dtype if precision.cast_forward_inputs else None)
    return cast(forward(*args, **kwargs), precision.output_dtype)
