"""Evaluations that stages cannot run: all ranks do, unit by unit, or each by itself with all of the model.

The latter is for a step that uses values of layers itself, as one that puts averaged weights into the model for a while
(latent diffusion's `ema_scope`), or differentiates by what layers are given, as for forces or attacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import named_tensors
from lightning_pfo.strategy.engine.endings import StepEndedError
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.model.partition import in_bytes
from lightning_pfo.strategy.model.reach.untouched import untouched
from lightning_pfo.strategy.model.tracing.noticing.held import HeldTensors
from lightning_pfo.strategy.model.tracing.trees import tree_leaves
from lightning_pfo.strategy.parallel.dtensor import writes
from lightning_pfo.strategy.parallel.groups import RanksApartError, meet
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.by_units.whole_parameters import whole_parameters
from lightning_pfo.strategy.step.effects.tensors import bytes_of
from lightning_pfo.strategy.step.outcome import Source, StepOnBatch

T = TypeVar("T")


class UnitEvaluations:
    """Runs evaluations that cannot be divided into stages.

    Args:
        engine: The pipeline engine of this rank.
        owner: The user's module.
    """

    def __init__(self, engine: PipelineEngine, owner: nn.Module) -> None:
        self._engine, self._owner = engine, owner
        self._refused: dict[Source, ConfigurationError] = {}
        self._by_each: set[Source] = set()

    def refused(self, source: Source) -> ConfigurationError | None:
        """Why stages cannot run a step on the batches of a loader; None: nobody has said so yet."""
        return self._refused.get(source)

    def run(self, of: StepOnBatch, refused: ConfigurationError, run: Callable[[], T]) -> T:
        """Run a step; a collective call of the pipeline.

        Args:
            of: The step.
            refused: Why stages do not.
            run: Runs it unit by unit.

        Raises:
            ConfigurationError: What stages have said, if it cannot be run so either.
            Exception: What the step has raised on any rank.
        """
        source = of.source
        if source not in self._by_each:
            is_first = source not in self._refused
            try:
                with _undone_if_it_fails(self._owner) if is_first else nullcontext():
                    result = run()
            except StepEndedError:
                raise
            except Exception as error:
                if not self._may_be_run_by_each(error, is_first=is_first):
                    if _is_of_units(error):
                        raise refused from error
                    raise
            else:
                self._note(of, refused, _BY_UNITS)
                return result
        self._by_each.add(source)
        self._note(of, refused, _BY_EACH)  # before it takes the memory
        try:
            with whole_parameters([self._owner], self._engine.device, self._engine.group):
                return run()
        except ConfigurationError as error:
            raise refused from error

    def _may_be_run_by_each(self, error: Exception, *, is_first: bool) -> bool:
        """Whether ranks have failed since they do not have all of the model; others wait for these in vain."""
        is_of_units = _is_of_units(error)
        may = is_first and (is_of_units or isinstance(error, RanksApartError))
        will_not, would_help = meet("a step that has failed", self._engine.host_group(), [not may, is_of_units])
        return would_help and not will_not

    def _note(self, of: StepOnBatch, refused: ConfigurationError, how: str) -> None:
        if of.source not in self._refused and self._engine.is_speaker:
            size = in_bytes(bytes_of(named_tensors(self._owner)))
            warn_once(how.format(kind=of.kind, why=refused, size=size))
        self._refused[of.source] = ConfigurationError(str(refused))  # its traceback holds what the step had


def _is_of_units(error: Exception) -> bool:
    """Whether a step may have failed only since units are run where they are held, without gradients."""
    return isinstance(error, ConfigurationError) or "require grad" in str(error)


_BY_UNITS = (
    "The {kind} step cannot be divided into stages; all ranks run it, on whole batches and layer by layer, each "
    "waiting for the one that holds the layer. That is slower; the results are those of one device. Why: {why}"
)
_BY_EACH = (
    "The {kind} step cannot be divided into stages, and uses values or gradients of layers itself; each rank runs it, "
    "on whole batches, with all parameters and buffers of the model ({size}), which it is sent for each batch. "
    "That is slower; the results are those of one device. Why: {why}"
)


@contextmanager
def _undone_if_it_fails(owner: nn.Module) -> Iterator[None]:
    """Put back what a step has written, if it fails: parameters, too."""
    held = HeldTensors(owner)
    with untouched(owner, only_if_it_fails=True):
        try:
            with _Remembering(held):
                yield
        except BaseException:
            with torch.no_grad():
                held.put_back()
            raise


class _Remembering(TorchFunctionMode):
    """Keeps the values that parameters have before they are written into."""

    def __init__(self, held: HeldTensors) -> None:
        super().__init__()
        self._held = held

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if writes(func, kwargs):
            self._held.remember(self._held.names(tree_leaves((args, kwargs))))
        return func(*args, **kwargs)
