"""The state of a split model in loops of one's own: whole where it is kept, a part of it on each rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops.together import Together
from lightning_pfo.strategy.build import Pipeline
from lightning_pfo.strategy.compat.modules import IncompatibleKeys, ModuleWithPlaceholders
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel.mesh import ProcessMesh
from lightning_pfo.strategy.state import full
from lightning_pfo.strategy.state.whole_module import gather_module
from lightning_pfo.strategy.step.by_units.whole_parameters import whole_parameters
from lightning_pfo.strategy.watch.present import naming_who_has_ended

WRITES_ON_FIRST = "(call it on every rank: it writes on the first one only)"
"""Said where ranks meet to save; scripts call it on the main process only."""


class ModelState(ModuleWithPlaceholders):
    """What a pipelined model keeps, saves and loads; see `PipelinedModel`."""

    module: nn.Module
    patches: Patches
    _mesh: ProcessMesh
    _pipeline: Pipeline
    _together: Together

    @property
    def iteration(self) -> int:
        """Number of training iterations so far; random numbers of a step derive from it, so restore it to resume."""
        return self._pipeline.engine.iteration

    @iteration.setter
    def iteration(self, iteration: int) -> None:
        self._pipeline.engine.iteration = iteration

    def adapt_saving(self) -> None:
        """Let transformers' models save all of them, and refuse to generate, until `patches` is closed."""
        module = self.module
        if not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers())):
            return
        if hasattr(module, "save_pretrained"):
            self.patches.set(module, "save_pretrained", self._saving_all(module.save_pretrained))
        if hasattr(module, "generate"):
            self.patches.set(module, "generate", _refuse_to_generate)

    def _saving_all(self, save: Any) -> Any:
        """Transformers' `save_pretrained`, which writes the whole model on the first rank."""

        def save_pretrained(directory: Any, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
            is_given = state_dict is not None
            if not is_given:
                self._together.meet(f"save_pretrained {WRITES_ON_FIRST}")
                state_dict = self.full_state_dict()
            saved = save(directory, *args, state_dict=state_dict, **kwargs) if dist.get_rank() == 0 else None
            if not is_given:
                self._together.meet("end of save_pretrained")
            return saved

        return save_pretrained

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise ConfigurationError(
            "A model on a pipeline is one with its processes, and is not copied. Copy what this rank holds of your own "
            "module, model.module; gather_module() gives a whole one on rank 0. An average of its weights, "
            "AveragedModel(model.module), is made and updated within `with model.whole_parameters():`, on every rank."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigurationError(
            "A model on a pipeline is one with its processes, and is not pickled (torch.save(model)). Call "
            "gather_module() for a whole one on rank 0, or full_state_dict() (accelerator.get_state_dict(model)), on "
            "every rank, and save what it gives."
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own state dict: its names, with placeholders for layers of other ranks."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's part of a full state dict, e.g. one of the module on a single process; a collective call.

        Ranks that are given an empty one, as `full_state_dict` gives them, take that of the first that has one.
        """
        state = self._given_to_some("the model", state_dict)
        return IncompatibleKeys(*full.load_module_state(self.module, state, strict=strict))

    @naming_who_has_ended()
    def full_state_dict(self) -> dict[str, Any]:
        """Gather the state dict of the whole module on rank 0 (empty on other ranks); a collective call."""
        self._together.meet("collecting the state of the model")
        if self._mesh.replica > 0:
            return {}
        return full.gather_module_state(self.module, self._pipeline.engine.last_rank, self._mesh.pipeline_group)

    @naming_who_has_ended()
    def gather_module(self) -> nn.Module | None:
        """The whole module on rank 0, None on other ranks; a collective call of all ranks.

        It is a copy in CPU memory without anything of the pipeline: to save it by its own methods, to export it, or to
        generate with it. Training goes on as before.

        Raises:
            ConfigurationError: On rank 0, if the module has something that cannot be copied.
        """
        self._together.meet("gathering the module")
        return gather_module(self.module, self._pipeline.engine.last_rank, self._mesh.pipeline_group, self.patches)

    @contextmanager
    def whole_parameters(self, *modules: nn.Module, gradients: bool = False) -> Iterator[None]:
        """Let modules have the layers of all ranks while the context is open; a collective call of all ranks.

        For code that goes over parameters, as to let a teacher follow its student. What is written is kept.

        Args:
            *modules: Parts of the model; without any, all of it.
            gradients: Whether their parameters have the gradients of all ranks, too, to be read.

        Raises:
            ConfigurationError: On every rank, if parameters are divided (tensor parallelism).
        """
        self._together.meet("whole_parameters")
        given, device, group = modules or (self.module,), self._pipeline.engine.device, self._mesh.pipeline_group
        with whole_parameters(given, device, group, gradients=gradients):
            yield

    @naming_who_has_ended()
    def full_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Gather an optimizer's state dict of all ranks on rank 0 (empty on other ranks); a collective call."""
        self._together.meet("collecting the state of an optimizer")
        if self._mesh.replica > 0:
            return {}
        return full.gather_optimizer_state(optimizer, self._mesh.pipeline_group)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a full optimizer state dict; a collective call.

        Ranks that are given an empty one, as `full_optimizer_state` gives them, take that of the first that has one.

        Raises:
            ConfigurationError: If none has.
        """
        given = self._given_to_some("an optimizer", state)
        if not given:
            raise ConfigurationError(
                "The state of an optimizer that is loaded is a whole one, on all ranks or on some (others take it); "
                f"got {state!r} on every rank. Load what optimizer.state_dict() of Accelerate's, or in a plain loop "
                "model.full_optimizer_state(optimizer), gave the first rank, called on every rank."
            )
        full.load_optimizer_state(optimizer, given)

    @naming_who_has_ended()
    def _given_to_some(self, what: str, state: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._together.is_over:  # each rank is on its own
            return state
        self._together.meet(f"loading the state of {what}")
        return full.given_to_some(state)


def _refuse_to_generate(*args: Any, **kwargs: Any) -> Any:
    raise ConfigurationError(
        "generate() runs the whole model in one process, and each process of a pipeline holds its own stages. Call "
        "whole = model.gather_module() of the pipelined model on every rank, and on the first whole.generate()."
    )
