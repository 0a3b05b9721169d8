"""How a module was divided before, which it keeps: it holds only the layers of some stages since."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.calls import LayerCalls
from lightning_pfo.strategy.model.split import Split
from lightning_pfo.strategy.model.units import Unit, Units

_SPLIT = "_pfo_split"


def remember_split(root: nn.Module, split: Split, stages: Sequence[int]) -> None:
    """Note how a module is split.

    Raises:
        ConfigurationError: If it was split before in another way, so that tensors this rank needs are gone.
    """
    noted = _noted_in(root, split.units)
    if noted is None:
        # without what units run, so that the module can be pickled
        bare = {unit: Unit(unit.name, unit.module, unit.is_layer) for unit in split.units.all}
        units = Units(split.units.name, list(bare.values()), tuple(bare[unit] for unit in split.units.layers))
        # in the first layer, which other modules may hold later, if there is any
        of_whole = split.units.layers[0].module if split.units.layers else root
        of_whole.__dict__[_SPLIT] = noted = (_with_units(split, units, bare), tuple(stages))
    before, stages_before = noted
    if before.boundaries != split.boundaries or stages_before != tuple(stages):
        raise ConfigurationError(
            f"This model was split before with boundaries {list(before.boundaries)} and holds only the layers of "
            f"stages {list(stages_before)}; now {list(split.boundaries)} (stages {list(stages)}) is asked for. Build "
            f"the model anew, or keep the partition, the schedule and the number of devices."
        )


def earlier_split(root: nn.Module, units: Units) -> Split | None:
    """How a module was split before; None if it was not."""
    noted = _noted_in(root, units)
    if noted is None:
        return None
    split, _ = noted
    # the same modules, in units of now; modules that the first batch called as a whole stay whole, and others divided
    of_module = {unit.module: unit for unit in units.all}
    names = {module: name for name, module in root.named_modules()}
    there = [unit for unit in split.units.all if unit.module in names]
    renewed = {
        unit: of_module.get(unit.module) or Unit(names[unit.module], unit.module, unit.is_layer) for unit in there
    }
    kept = {unit.module for unit in renewed}
    parts = {part for module in kept for part in module.modules() if part not in kept}
    others = [unit for unit in units.all if unit.module not in parts and kept.isdisjoint(unit.module.modules())]
    return _with_units(split, Units(units.name, [*renewed.values(), *others], units.layers), renewed)


def _noted_in(root: nn.Module, units: Units) -> tuple[Split, tuple[int, ...]] | None:
    """How a module was split before, and which stages are here; None if it was not.

    Args:
        root: The user's module, which holds all layers of that time.
        units: Its units as they are found now; those of that time may be parts of them.
    """
    there = set(root.modules())
    for module in (*(layer.module for layer in units.layers[:1]), *root.modules()):
        noted: tuple[Split, tuple[int, ...]] | None = module.__dict__.get(_SPLIT)
        if noted is not None and all(layer.module in there for layer in noted[0].calls.layers):
            return noted
    return None


def _with_units(split: Split, units: Units, renewed: dict[Unit, Unit]) -> Split:
    """The same division of the same modules, in other units."""
    calls = LayerCalls(
        tuple(renewed[unit] for unit in split.calls.layers),
        tuple(tuple(renewed[unit] for unit in others if unit in renewed) for others in split.calls.others),
        split.calls.undivided,
    )
    owners = {renewed[unit]: stages for unit, stages in split.owners.items() if unit in renewed}
    return Split(
        units,
        calls,
        split.boundaries,
        owners,
        split.held,
        split.tied,
        weights=split.weights,
        holds_once=split.holds_once,
        look=split.look,
    )
