"""Parameters into which a step writes where no trace of it has shown that: each microbatch's step would do so."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.compat.tensors import DisableTorchFunctionSubclass, version_of
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram
from lightning_pfo.strategy.model.tracing.ends import WrittenError
from lightning_pfo.strategy.model.variables import users_module

_DATA: Any = torch.Tensor.data
_given: list[tuple[nn.Parameter, torch.Tensor, str, int, nn.Module | None]] | None = None
"""What `parameter.data` has given while a step runs, to which file, line and module: it counts versions of its own."""


def watch_data(patches: Patches) -> None:
    """Let parameters note who asks for their `data` while a step is `watched`.

    Args:
        patches: Gives torch's own way back when it is closed.
    """
    if not isinstance(vars(nn.Parameter).get("data"), property):
        patches.set(nn.Parameter, "data", property(_data_of, _DATA.__set__))


def _data_of(parameter: nn.Parameter) -> torch.Tensor:
    data: torch.Tensor = _DATA.__get__(parameter)
    if _given is not None:
        asking: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
        _given.append((parameter, data, asking.f_code.co_filename, asking.f_lineno, users_module()))
    return data


class WrittenWeights:
    """Finds the parameters that were written into since this was made.

    Args:
        parameters: Those of the model. Of other ranks' no values are here that could change, divided ones change as
            layers gather them, and some of other classes have no memory of their own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [each for each in parameters if type(each) is nn.Parameter and not each.is_meta]
        self._before = self._now()
        self._places: dict[int, str] = {}
        self._writers: dict[int, set[nn.Module | None]] = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While the context is open, a step runs."""
        global _given
        outer, _given = _given, []
        try:
            yield
        finally:
            given, _given = _given, outer
            for parameter, data, file, line, module in given:
                if version_of(data):
                    self._places.setdefault(id(parameter), f"{file}, line {line}")
                    self._writers.setdefault(id(parameter), set()).add(module)

    def found(self) -> list[nn.Parameter]:
        """Those parameters."""
        now = self._now()
        if now == self._before and not self._places:
            return []
        changed = {id(p) for p, a, b in zip(self._parameters, now, self._before, strict=True) if a != b}
        return [each for each in self._parameters if id(each) in changed or id(each) in self._places]

    def error(self, owner: nn.Module, programs: Iterable[StageProgram]) -> WrittenError | None:
        """What is said where something was written without being known, with its name and, if it is known, the line.

        Args:
            owner: The user's module.
            programs: What the step was known to do.
        """
        found = self.found()
        known, parts = _known(owner, programs) if found else (set(), set())
        known |= {written for written, modules in self._writers.items() if modules <= parts}
        unknown = [each for each in found if id(each) not in known]
        if not unknown:
            return None
        name = next((name for name, each in owner.named_parameters() if each is unknown[0]), "")
        place = self._places.get(id(unknown[0]), "")
        return WrittenError(
            f"A step that writes into parameters does so from the first batch on, whose trace shows that it is to be "
            f"done once for a batch and not for each microbatch; this one wrote into {name!r}"
            f"{f' ({place})' if place else ''} and has not before. Write there in the first batch too, as it is "
            f"(decay=1.0), or do so outside of the step: in on_train_batch_start or on_train_batch_end, within "
            f"self.trainer.strategy.whole_parameters(...), or in your loop, within model.whole_parameters(...)."
        )

    def _now(self) -> list[tuple[int, int]]:
        with DisableTorchFunctionSubclass():
            return [(version_of(each), each.data_ptr()) for each in self._parameters]


def _known(owner: nn.Module, programs: Iterable[StageProgram]) -> tuple[set[int], set[nn.Module | None]]:
    """The parameters that a step is known to change, by itself or in a layer; and parts of layers: they may change any.

    What these write through `data` no trace shows: it is of each microbatch, and a warning names it.
    """
    names, layers, parts = set[str](), set[nn.Module](), set[nn.Module | None]()
    for program in programs:
        names.update(program.changes)
        for event in program.events:
            for unit in event.units:
                parts.update(unit.module.modules())
                if event.changes_weights:
                    layers.add(unit.module)
    by_step = {id(each) for name, each in owner.named_parameters(remove_duplicate=False) if name in names}
    return by_step | {id(each) for layer in layers for each in layer.parameters()}, parts
