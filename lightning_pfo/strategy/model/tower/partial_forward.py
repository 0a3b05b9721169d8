"""One stage of a module with a tower of layers: the module's own `forward`, from the stage's first layer to its last.

Every stage has the module's inputs, because all ranks of a pipeline read the same batch. So it runs the module's
unchanged `forward`: masks, position ids and whatever else follows from the inputs are computed where they are needed.
Embeddings and layers before the stage's first layer are stand-ins (see `stand_ins`). When `forward` calls the first
layer, the arguments that only earlier stages can know are replaced by what was received; when it calls the first layer
of the next stage, it ends, and those arguments are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.caches import Caches
from lightning_pfo.strategy.model.find import PipelinedModule
from lightning_pfo.strategy.model.redirection import Redirection, redirected
from lightning_pfo.strategy.model.sequential import StageModule
from lightning_pfo.strategy.model.tower.absent_modules import StandIns, is_nan
from lightning_pfo.strategy.parallel.compat import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_OUTPUTS_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")

Positions = tuple[int, ...]
"""Which of the arguments of a layer's call, flattened, are sent from one stage to the next."""


@dataclass
class TowerLayout:
    """How the module runs on inputs of one form.

    Attributes:
        stand_ins: What modules on earlier stages return.
        received: What the stage receives, of the arguments of its first layer.
        sent: What it sends, of the arguments of the next stage's first layer.
    """

    stand_ins: StandIns
    received: Positions = ()
    sent: Positions = ()


class _ForwardEnded(BaseException):
    """Ends the module's forward; a BaseException because models may catch `Exception`."""


class TowerStage(StageModule):
    """Runs the layers from `start` up to, not including, `stop`, and what the module does around them.

    Args:
        pipelined: The module.
        start: First layer.
        stop: The layer after the last.
        owned: The surrounding modules that this stage runs.
        device: Where the stage runs.
    """

    takes_inputs_everywhere = True

    def __init__(
        self,
        pipelined: PipelinedModule,
        start: int,
        stop: int,
        *,
        owned: Sequence[nn.Module],
        device: torch.device,
    ) -> None:
        own = [site.module for site in pipelined.layers[start:stop]]
        super().__init__([*own, *owned], is_first=start == 0, is_last=stop == len(pipelined.layers))
        self._name = f"{type(pipelined.module).__name__} {pipelined.name!r}"
        self._pipelined = pipelined
        self._call_module = pipelined.module.forward  # as it is now, before steps are redirected
        self._device = device
        self._start, self._stop, self._num_layers = start, stop, len(pipelined.layers)
        self._redirections = [
            Redirection(site, self._layer_call(index)) for index, site in enumerate(pipelined.layers[: stop + 1])
        ]
        if start > 0:
            self._redirections += [Redirection(site, self._surrounding_call) for site in pipelined.surroundings]
        self._caches = Caches()
        self.layout = TowerLayout(StandIns(device, self._caches))
        self._begin((), stop)

    def _begin(self, tensors: tuple[torch.Tensor, ...], end: int) -> None:
        self.layout.stand_ins.rewind()
        self._tensors = tensors
        self._end = end
        self._num_calls = 0
        self._entered = self.is_first
        self._replaced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._last_call: list[Any] = []

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Run the stage on what the previous stage sent (the first stage: on anything)."""
        try:
            value, leaves = self._run(tensors, self._stop)
            if self.is_last:
                value = self._with_received(value)
                self._check(tree_leaves(value), "its output")
                return self.keep_output(value)
            sent = [leaves[position].contiguous() for position in self.layout.sent]
            return tuple(tensor.view_as(tensor) for tensor in sent)  # what is only passed on is an output of its own
        finally:
            self._begin((), self._stop)  # hold nothing of the microbatch

    def find_received(self) -> Positions:
        """Begin a new layout: find what must be received, by running the module up to the stage's first layer.

        Raises:
            ConfigurationError: If that is nothing, so that earlier layers would have no effect; or if outputs of all
                layers are asked for.
        """
        self._refuse_outputs_of_all_layers()
        self.layout = layout = TowerLayout(StandIns(self._device, self._caches))
        if self.is_first:
            return ()
        with torch.no_grad():
            _, leaves = self._run((), self._start)
        made = layout.stand_ins.made()
        layout.received = tuple(index for index, leaf in enumerate(leaves) if id(leaf) in made or is_nan(leaf))
        if not layout.received:
            raise ConfigurationError(
                f"Layer {self._start} of {self._name} does not take what earlier layers computed as an argument, so "
                f"the module cannot be split there. Pass it from layer to layer."
            )
        return layout.received

    def _refuse_outputs_of_all_layers(self) -> None:
        ((_, kwargs),) = self.inputs.values()
        config = getattr(self._pipelined.module, "config", None)
        asked_for = [name for name in _OUTPUTS_OF_ALL_LAYERS if kwargs.get(name, getattr(config, name, False))]
        if asked_for and not (self.is_first and self.is_last):
            raise ConfigurationError(
                f"{asked_for[0]}=True asks {self._name} for something of all its layers, but no stage has all of them. "
                f"Call it with {asked_for[0]}=False."
            )

    def send(self, positions: Positions) -> None:
        """Take what `find_received` of the next stage returned."""
        self.layout.sent = positions

    def _run(self, tensors: tuple[torch.Tensor, ...], end: int) -> tuple[Any, list[Any]]:
        """Call the module until it calls layer `end`; returns its output or the arguments of that call, flattened."""
        ((args, kwargs),) = self.inputs.values()  # of the microbatch that is about to run
        self._begin(tensors, end)
        try:
            with redirected(self._redirections):
                output = self._call_module(*args, **kwargs)
        except _ForwardEnded:
            return None, self._last_call
        if self._num_calls < self._num_layers:
            raise ConfigurationError(
                f"{self._name} is split between its layers, so its forward calls each of them once; it returned after "
                f"calling {self._num_calls} of {self._num_layers}. Do not skip layers (layerdrop=0)."
            )
        return output, []

    def _layer_call(self, index: int) -> Callable[..., Any]:
        def call(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if index != self._num_calls:
                raise ConfigurationError(
                    f"{self._name} is split between its layers, so its forward calls each of them once and in order; "
                    f"layer {index} was called when {self._num_calls} was next. Name the nn.ModuleList to split: "
                    f"pipeline_module='...'."
                )
            self._num_calls += 1
            if index < self._start and index < self._end:
                return self.layout.stand_ins.call(layer, args, kwargs)
            leaves, structure = tree_flatten((args, kwargs))
            if index == self._end:
                self._last_call = [self._with_received(leaf) for leaf in leaves]
                if self._entered:
                    self._check(self._last_call, f"the arguments of layer {index}")
                raise _ForwardEnded
            if index == self._start and not self.is_first:
                self._enter(leaves)
            if self._replaced:
                args, kwargs = tree_unflatten([self._with_received(leaf) for leaf in leaves], structure)
                self._check(tree_leaves((args, kwargs)), f"the arguments of layer {index}")
            return layer(*args, **kwargs)

        return call

    def _surrounding_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._entered:
            return module(*args, **kwargs)
        return self.layout.stand_ins.call(module, args, kwargs)

    def _enter(self, leaves: list[Any]) -> None:
        self._entered = True
        # the arguments are kept beside what replaces them, so that their ids stay theirs
        self._replaced = {
            id(leaves[position]): (leaves[position], tensor)
            for position, tensor in zip(self.layout.received, self._tensors, strict=True)
        }

    def _with_received(self, value: Any) -> Any:
        """Replace, in a tensor or a nested value, the tensors that stand for received ones."""
        if not self._replaced:
            return value
        return tree_map_only(torch.Tensor, lambda leaf: self._replaced.get(id(leaf), (leaf, leaf))[1], value)

    def _check(self, leaves: list[Any], where: str) -> None:
        if self.checks and any(map(is_nan, leaves)):
            raise ConfigurationError(
                f"On the stage of layers {self._start}-{self._stop - 1} of {self._name}, {where} contain NaN: they "
                f"depend on a value that an earlier stage computed and did not pass as an argument to layer "
                f"{self._start} (or the model itself computes NaN). Pass the value as an argument to each layer that "
                f"needs it."
            )
