"""Weights that layers write into in their forward, as those that normalise them do: once for a batch.

On one device the backward finds what the forward has written. On a pipeline other microbatches run forward between the
two. So each begins with what the batch began with, and writes the same; that it does is looked at. Where it does not in
the first batch, as what a layer writes depends on the samples, each goes on from the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias, TypeGuard

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import memory_of, reserved_memory, version_of, version_restorer
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.model.tracing.tracked import following

_OTHERWISE = (
    "A layer writes into its parameter {name} in its forward something else for each microbatch, and its backward "
    "needs what was written for its own. On one device it writes once, for the batch. If what it writes depends on the "
    "batch, keep it in a buffer, or write it in on_train_batch_end; with num_microbatches=1 and schedule='gpipe' all "
    "is that of one device."
)


Programs: TypeAlias = Sequence[Sequence[StageProgram]]
"""What each stage does, for each microbatch."""


class RewrittenWeights:
    """Puts back, before each microbatch, the weights that layers have written into.

    Args:
        owner: The user's module.

    Attributes:
        are_open: Whether it is not known yet that each microbatch writes the same, or that it does not.
        names: The weights that are put back, of layers of this rank.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._of_stage: dict[int, list[_Weight]] = {}
        self._begun: list[_Weight] = []
        self._are_tried = False
        self._puts_back = True
        self.are_open = True
        self.names: Collection[str] = ()

    @contextmanager
    def of_run(self, programs: Programs, stages: Collection[int], *, trains: bool, counts: bool) -> Iterator[None]:
        """A step runs on stages of this rank.

        Args:
            programs: What each stage does, for each microbatch.
            stages: Those of this rank.
            trains: Whether it runs backward.
            counts: Whether what layers write stays.
        """
        before = self._begun, self._of_stage
        are_some = any(program.writing for of_stages in programs for program in of_stages)
        self._are_tried = self._are_tried or (trains and are_some)
        puts_back = self._puts_back and (trains or not self.are_open)
        weights = _weights_of(programs, stages) if are_some and (puts_back or not counts) else {}
        self._begun = [each for of_stage in weights.values() for each in of_stage]
        self._of_stage = weights if puts_back else {}
        held = {id(each.parameter) for each in self._begun}
        of_model = self._owner.named_parameters(remove_duplicate=False) if held else ()
        self.names = {name for name, each in of_model if id(each) in held}
        try:
            yield
        finally:
            if not counts:
                self.restore()
                self._begun, self._of_stage = before

    @contextmanager
    def of_microbatch(self, stage: int) -> Iterator[None]:
        """A stage runs the step on a microbatch.

        Raises:
            ConfigurationError: If a layer writes something else than for the microbatch before.
        """
        weights = self._of_stage.get(stage, ())
        with following(None):
            for each in weights:
                each.put_back()
        try:
            yield
        finally:  # an exception ends a stage
            with following(None), torch.no_grad():
                other = next((each for each in weights if each.is_other()), None)
            if other is not None:
                name = next(name for name, each in self._owner.named_parameters() if each is other.parameter)
                raise ConfigurationError(_OTHERWISE.format(name=f"self.{name}"))

    def give_up(self) -> bool:
        """From now on each microbatch goes on from the one before, as the batch that has failed may need.

        Returns:
            Whether it is another way than that batch was run in. All ranks answer alike: they know what layers of
            others do.
        """
        if not (self.are_open and self._are_tried):
            return False
        self.are_open = self._puts_back = False
        return True

    def settle(self) -> None:
        """A batch of several microbatches has been trained on, as others are from now on."""
        self._puts_back = self._puts_back and self._are_tried
        self.are_open = False

    def restore(self) -> None:
        """Let weights be what they were when the latest run began: it has failed, or does not count."""
        for each in self._begun:
            each.put_back()

    def forget(self) -> None:
        """The run is done."""
        self._begun, self._of_stage = [], {}


class _Weight:
    """A weight, and what it was when the batch began."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self._begun = parameter.detach().clone()
        self._memory, self._reserved = memory_of(parameter), reserved_memory(parameter)
        self._restore_version: Callable[[], None] = version_restorer(parameter)
        self._first: tuple[int, torch.Tensor] | None = None

    def put_back(self) -> None:
        if memory_of(self.parameter) == self._memory:
            self.parameter.data.copy_(self._begun)
        else:  # its data was set, and graphs may have views of them
            self.parameter.data = self._begun.clone()
        self._restore_version()

    def is_other(self) -> bool:
        """Whether a microbatch has left something else than the first one."""
        norm = torch.linalg.vector_norm(self.parameter, dtype=torch.promote_types(self.parameter.dtype, torch.float64))
        now = version_of(self.parameter), torch.stack([norm, self.parameter.sum(dtype=norm.dtype)])
        if self._first is None:
            self._first = now
        return self._first[0] != now[0] or not torch.equal(self._first[1], now[1])


def _weights_of(programs: Programs, stages: Collection[int]) -> dict[int, list[_Weight]]:
    """The weights that layers write into, by stage; not of embeddings that limit norms: each writes other rows."""
    found: dict[int, list[_Weight]] = {}
    seen = set[int]()
    writing = ((index, each) for of_stages in programs for index in stages for each in of_stages[index].writing)
    for stage, (layer, names) in writing:
        of_layer = dict(layer.named_parameters(remove_duplicate=False))
        for name in names:
            parameter, part = of_layer.get(name), name.rpartition(".")[0]
            is_limited = parameter is not None and getattr(layer.get_submodule(part), "max_norm", None) is not None
            if _can_be_put_back(parameter) and not is_limited and id(parameter) not in seen:
                seen.add(id(parameter))
                found.setdefault(stage, []).append(_Weight(parameter))
    return found


def _can_be_put_back(parameter: nn.Parameter | None) -> TypeGuard[nn.Parameter]:
    """Whether its numbers are here: not of a divided one, nor of one on another rank."""
    if type(parameter) is not nn.Parameter or is_placeholder(parameter):
        return False
    return parameter.is_floating_point() and not parameter.is_meta
