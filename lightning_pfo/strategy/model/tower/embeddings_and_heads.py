"""When a module with a tower calls what surrounds the layers, and so which stage needs it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.model.caches import Caches
from lightning_pfo.strategy.model.find import PipelinedModule, Site
from lightning_pfo.strategy.model.redirection import Redirection, redirected
from lightning_pfo.strategy.model.tower.absent_modules import StandIns, call_on_meta

_log = logging.getLogger(__name__)

Phases = Mapping[Site, frozenset[int]]
"""For surrounding modules how many layers have been called whenever they are: 0 for an embedding, all for a head."""


class _Forward(nn.Module):
    """Calls a module with redirections in place."""

    def __init__(self, module: nn.Module, redirections: list[Redirection]) -> None:
        super().__init__()
        self.module = module
        self._in_place = redirections

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with redirected(self._in_place):
            return self.module.forward(*args, **kwargs)


def find_phases(pipelined: PipelinedModule) -> Phases:
    """Find when surrounding modules are called, by running the module on the meta device, which computes nothing.

    That takes example inputs, which Hugging Face models have (`dummy_inputs`).

    Returns:
        The phases of surrounding modules that are only used by calling them; nothing if there are no example inputs. A
        module without phases is safely kept on every rank.
    """
    model = _with_example(pipelined)
    if model is None or not pipelined.surroundings:
        return {}
    inputs = {name: value for name, value in model.dummy_inputs.items() if "mask" not in name}  # models look into masks
    num_calls = 0
    phases: dict[Site, set[int]] = {site: set() for site in pipelined.surroundings}
    used_otherwise: set[Site] = set()
    caches = Caches()
    stand_ins = StandIns(torch.device("meta"), caches)

    def call_layer(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal num_calls
        num_calls += 1
        return stand_ins.call(layer, args, kwargs)

    def call_surrounding(site: Site, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        phases[site].add(num_calls)
        return module.forward(*args, **kwargs)  # without hooks, which may gather parameters

    def see_attribute(site: Site, value: Any) -> None:
        if isinstance(value, (torch.Tensor, nn.Module)):
            used_otherwise.add(site)

    redirections = [Redirection(site, call_layer) for site in pipelined.layers]
    for site in pipelined.surroundings:
        redirections.append(Redirection(site, partial(call_surrounding, site), partial(see_attribute, site)))
    try:
        call_on_meta(_Forward(model, redirections), (), inputs, caches)
    except Exception as error:
        _log.warning(
            "What surrounds the layers of %s is kept on every rank, because the model did not run on its dummy_inputs "
            "on the meta device: %s",
            type(model).__name__,
            error,
        )
        return {}
    return {site: frozenset(when) for site, when in phases.items() if when and site not in used_otherwise}


def _with_example(pipelined: PipelinedModule) -> Any:
    """The outermost model that holds all layers and has example inputs."""
    layers = {id(site.module) for site in pipelined.layers}
    for module in pipelined.module.modules():
        has_example = isinstance(getattr(module, "dummy_inputs", None), dict)
        if has_example and layers.issubset(map(id, module.modules())):
            return module
    return None
