"""Large models: built on the meta device, of which a rank makes only what it holds.

A module created under `torch.device("meta")` has no values. Those that a rank holds are made and initialised here, as
the module itself does it (`reset_parameters`; in a Hugging Face model `_init_weights`), with random numbers that depend
on the module's place in the model and not on the partition: any number of stages begins with the same values.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import named_tensors, tensors_of
from lightning_pfo.strategy.model.compat import Initialiser, initialiser_of, own_initialiser
from lightning_pfo.strategy.model.ownership import Users
from lightning_pfo.strategy.parallel import random_state


def materialise(
    root: nn.Module,
    users: Users,
    stages: Collection[int],
    device: torch.device,
    seed: int,
) -> None:
    """Make and initialise the tensors on the meta device that this rank holds; tied ones stay tied.

    A module is initialised as a whole, so it may get tensors for which this rank has no use.

    Args:
        root: The user's module; changed in place.
        users: The stages that use each tensor.
        stages: The stages of this rank.
        device: Where the tensors are made.
        seed: Seed shared by all ranks.

    Raises:
        ConfigurationError: If a module cannot initialise its tensors.
    """
    wanted = {
        id(tensor)
        for name, tensor in named_tensors(root).items()
        if tensor.is_meta and not users[name].isdisjoint(stages)
    }
    made: dict[int, nn.Parameter] = {}
    initialisers = _initialisers(root)
    with random_state.isolated(device):
        for index, module in enumerate(root.modules()):
            own = tensors_of(module)
            parameters = {name: p for name, p in own.parameters.items() if p is not None and p.is_meta}
            buffers = {name: buffer for name, buffer in own.buffers.items() if buffer is not None and buffer.is_meta}
            if wanted.isdisjoint(map(id, (*parameters.values(), *buffers.values()))):
                continue
            for name, parameter in parameters.items():
                if id(parameter) not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                own.parameters[name] = made[id(parameter)]
            for name, buffer in buffers.items():
                own.buffers[name] = torch.empty_like(buffer, device=device)
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
