"""Large models: built on the meta device, of which a rank makes only what it holds.

A module created under `torch.device("meta")` has no values. Those that a rank holds are made and initialised here, as
the module itself does it (`reset_parameters`; in a Hugging Face model `_init_weights`), with random numbers that depend
on the module's place in the model and not on the partition: any number of stages begins with the same values.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.compat import Initialiser, initialiser_of, own_initialiser
from lightning_pfo.strategy.model.ownership import Part, modules_elsewhere
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.compat import tensors_of


def materialise(
    root: nn.Module,
    parts: Sequence[Part],
    stages: Collection[int],
    shared: Sequence[nn.Parameter],
    device: torch.device,
    seed: int,
) -> None:
    """Make and initialise the tensors on the meta device that this rank holds; tied ones stay tied.

    Args:
        root: The user's module; changed in place.
        parts: What each stage runs.
        stages: The stages of this rank.
        shared: Parameters that every rank holds.
        device: Where the tensors are made.
        seed: Seed shared by all ranks.

    Raises:
        ConfigurationError: If a module cannot initialise its tensors.
    """
    elsewhere = {id(module) for module in modules_elsewhere(parts, stages)}
    kept = {id(parameter) for parameter in shared}
    made: dict[int, nn.Parameter] = {}
    initialisers = _initialisers(root)
    with random_state.isolated(device):
        for index, module in enumerate(root.modules()):
            is_here = id(module) not in elsewhere
            own = tensors_of(module)
            names = [
                name
                for name, parameter in own.parameters.items()
                if parameter is not None and parameter.is_meta and (is_here or id(parameter) in kept)
            ]
            buffers = [name for name, buffer in own.buffers.items() if buffer is not None and buffer.is_meta]
            for name in names:
                parameter = own.parameters[name]
                assert parameter is not None
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                own.parameters[name] = made[id(parameter)]
            for name in buffers if is_here else ():
                buffer = own.buffers[name]
                assert buffer is not None
                own.buffers[name] = torch.empty_like(buffer, device=device)
            if names or (buffers and is_here):
                random_state.seed(device, seed, index)
                _initialise(module, initialisers.get(id(module)))


def _initialisers(root: nn.Module) -> dict[int, Initialiser]:
    """For modules inside a Hugging Face model, what initialises them."""
    found: dict[int, Initialiser] = {}
    for model in root.modules():
        initialise = initialiser_of(model)
        if initialise is not None:
            found |= {id(module): initialise for module in model.modules()}  # the innermost model comes last
    return found


def _initialise(module: nn.Module, initialise: Initialiser | None) -> None:
    reset = own_initialiser(module)
    with torch.no_grad():
        if initialise is not None:
            initialise(module)
        elif reset is not None:
            reset()
        else:
            raise ConfigurationError(
                f"{type(module).__name__} was created on the meta device, and this rank has to make its tensors: it "
                f"needs a method reset_parameters() that initialises those it holds itself. Add one, or create the "
                f"module outside of torch.device('meta')."
            )
