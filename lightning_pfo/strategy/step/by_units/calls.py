"""A call of a unit where all ranks run the same code: one of those that hold it runs it, and tells the others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pfo.core.wording import shortened
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.engine.forked import is_forked, refuse_forked
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.tracing.forms.left import Kept
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder, placeholders_on
from lightning_pfo.strategy.model.tracing.tracked import not_here
from lightning_pfo.strategy.model.tracing.trees import tree_leaves
from lightning_pfo.strategy.model.units import Unit
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.groups import RanksApartError, meet
from lightning_pfo.strategy.step.by_units.changes import Given, Told
from lightning_pfo.strategy.step.by_units.whole_parameters import whole_parameters
from lightning_pfo.strategy.step.effects.within import runs_by_units, within_step
from lightning_pfo.strategy.step.values import RULE_OF_TEXTS, ValueExchange

_CALL = "a call of "


class UnitCalls:
    """Lets all ranks together call units that some of them hold; each of these is run forward only.

    Args:
        split: How the model is divided.
        owner: The user's module.
        engine: The pipeline engine of this rank.
        outside_steps: Whether that is so wherever no step is under way, as in hooks; else only in steps that run so.
    """

    def __init__(self, split: Split, owner: nn.Module, engine: PipelineEngine, *, outside_steps: bool) -> None:
        self._engine = engine
        self._owner = owner
        self._outside_steps = outside_steps
        self._is_alone = False
        self._holders: dict[Unit, int | None] = {}
        self._exchanges: dict[Unit, ValueExchange] = {}
        for unit in split.units.all:
            unit.outside = self.call

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a unit; a collective call, but in a step that stages run, and where the unit is everywhere.

        Raises:
            ConfigurationError: If it is not here, and nobody else is known to call it now; if it is not here as a
                whole, and this process was forked from a rank; or if what it returns cannot be sent.
            RanksApartError: If other ranks do something else.
        """
        engine = self._engine
        if is_forked():
            return _alone(unit, args, kwargs)
        if self._is_alone:  # within another unit, which was given this one
            return unit.compute(*args, **kwargs)
        # of a step the last stage follows nothing more once it has begun, and recomputed layers are called in backward
        if engine.num_ranks == 1 or engine.is_running or (within_step() and not runs_by_units()):
            return unit.compute(*args, **kwargs)
        if not (self._outside_steps or runs_by_units()):
            if unit.is_elsewhere:
                raise not_here(unit.name)
            return unit.compute(*args, **kwargs)
        holder = self._holder_of(unit, _texts_in(args, kwargs))
        if holder is None:  # it may be differentiated, where the caller does
            return unit.compute(*args, **kwargs)
        given = Given((args, kwargs), self._modules)
        result, sent, error = None, None, None
        lent = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._modules]
        with self._lent(lent) if lent else nullcontext():
            if engine.rank == holder:
                try:
                    self._is_alone = True
                    result, *sent = self._run(unit, args, kwargs, given)
                except Exception as exception:
                    error = exception
                finally:
                    self._is_alone = False
        if (exchange := self._exchanges.get(unit)) is None:
            exchange = ValueExchange(engine.device, engine.group, engine.host_group(), holder)
            self._exchanges[unit] = exchange
        told, drawn = exchange.share(sent, error)
        if engine.rank == holder:
            return result
        if drawn:
            random_state.set_state(pickle.loads(drawn), engine.device)
        return given.after(told, unit, engine.device)

    @contextmanager
    def _lent(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Let the rank that runs a unit have what is given to it, which may call that."""
        with ExitStack() as stack:
            with placeholders_on(torch.device("meta")):  # they say elsewhere that they are here
                stack.enter_context(whole_parameters(modules, self._engine.device, self._engine.group))
            yield

    def _run(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], given: Given) -> tuple[Any, Told, bytes]:
        """What a unit returns here, what others are told, and the random numbers that are left if it has drawn some."""
        device = self._engine.device
        before = random_state.get_state(device)
        with torch.no_grad(), Kept(unit.module) as kept:
            result = unit.compute(*args, **kwargs)
        after = random_state.get_state(device)
        told = given.told(result, kept.take_left(), unit)
        return result, told, b"" if random_state.same_state(before, after) else pickle.dumps(after)

    def _holder_of(self, unit: Unit, texts: str) -> int | None:
        """The first rank that has all of a unit; None if all have, as within `whole_parameters`, or none.

        Args:
            unit: The unit.
            texts: Those that it is given: by them calls of one unit are told apart.
        """
        tensors = (*unit.module.parameters(), *unit.module.buffers())
        if not tensors:
            return None
        is_here = not any(map(is_placeholder, tensors))
        try:
            (is_missed,) = meet(f"{_CALL}{unit.name!r}{texts}", self._engine.host_group(), [not is_here])
        except RanksApartError as error:
            if not all(place.startswith(_CALL) for place in error.places):  # others call nothing
                raise
            raise RanksApartError(f"{error} {RULE_OF_TEXTS}", error.places) from None
        if not is_missed:
            return None
        if unit not in self._holders:
            everywhere = self._engine.all_gather(is_here)
            self._holders[unit] = everywhere.index(True) if any(everywhere) else None
        return self._holders[unit]

    @cached_property
    def _modules(self) -> Mapping[int, nn.Module]:
        """The modules of the model by their ids; all ranks have them in the same order."""
        return {id(module): module for module in self._owner.modules()}


def _texts_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    texts = [shortened(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, str)]
    return f" with {', '.join(texts)}" if texts else ""


def _alone(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a unit in a process that was forked from a rank: as an ordinary module, if that has all of it."""
    tensors = (*unit.module.parameters(), *unit.module.buffers())
    if any(is_placeholder(tensor) or isinstance(tensor, DTensor) for tensor in tensors):
        refuse_forked(f"a call of {unit.name!r}, of which this rank does not hold all,")
    return unit.compute(*args, **kwargs)
