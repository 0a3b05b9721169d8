"""The modules of which a stage runs some and leaves out others: units, and which of them count as layers.

A unit is called as a whole; around the units runs the user's own code. Layers are the units that a partition divides:
the items of the lists (`nn.Sequential`, `nn.ModuleList`) that hold most of the parameters, or where there are no lists
the parts of the module one after the other. What else is called goes along with the layer before it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import BackwardHooks, children_of, forward_hooks_of
from lightning_pfo.strategy.model.tracing.backward_hooks import call_with
from lightning_pfo.strategy.model.tracing.placeholders import is_placeholder
from lightning_pfo.strategy.parallel.holder import Holder

_LEAST_SHARE = 0.05
"""Lists with a smaller share of the parameters of all lists, such as a head beside a large model, hold no layers."""

_HEAVY = 2.0
"""A layer that is heavier than the mean by this factor is divided, if it consists of lists itself."""


@dataclass(eq=False)
class Unit:
    """A module that is called as a whole.

    Attributes:
        name: Dotted name in the user's module.
        module: The module.
        is_layer: Whether a partition counts it.
        followed_into: Of a layer: whether units inside are followed instead, as somebody listens to these.
        forward: Its `forward`, as it is while the calls are followed.
        replacement: What runs instead of its `forward`, such as a compiled one; None: its `forward`.
        outside: How it is called where no step is under way, if not all ranks hold it; None: only those that do can.
        backward_hooks: Hooks on its backward, which are called where it really runs.
        copied_from: The unit that this is a copy of, made since the model was divided; it is where that is.
    """

    name: str
    module: nn.Module
    is_layer: bool = False
    followed_into: bool = False
    forward: Callable[..., Any] | None = None
    replacement: Holder | None = None
    outside: Callable[[Unit, tuple[Any, ...], dict[str, Any]], Any] | None = None
    backward_hooks: list[BackwardHooks] = field(default_factory=list)
    copied_from: Unit | None = None

    def copied(self, module: nn.Module, forward: Callable[..., Any]) -> Unit:
        """A unit of a copy of the module, with its `forward`."""
        return Unit(self.name, module, forward=forward, outside=self.outside, copied_from=self.copied_from or self)

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Run it on ordinary tensors."""
        run = self.replacement or self.forward
        assert run is not None
        if self.backward_hooks:
            return call_with(self.backward_hooks, self.module, run, args, kwargs)
        return run(*args, **kwargs)

    @property
    def num_parameters(self) -> int:
        """Number of its parameters."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def is_listened(self) -> bool:
        """Whether somebody hooks into a part of it, and would miss what other stages compute."""
        return not self.followed_into and _is_listened(self.module)

    @property
    def is_elsewhere(self) -> bool:
        """Whether its tensors are placeholders for those of another rank."""
        return any(map(is_placeholder, self.module.parameters()))


@dataclass(frozen=True)
class Units:
    """The units of a user's module, in the order in which it holds them.

    Attributes:
        name: The dotted name of what is split; empty for the user's module itself.
        all: All units; more are added where a unit is followed into.
        layers: Those that count as layers.
    """

    name: str
    all: list[Unit] = field(repr=False)
    layers: tuple[Unit, ...] = field(repr=False)


def find_units(
    root: nn.Module,
    name: str | None = None,
    at_least: int = 1,
    called: Collection[str] | None = None,
    opened: Collection[str] = (),
    whole: Collection[str] = (),
    beside: Collection[str] = (),
) -> Units:
    """Find the units of the user's module.

    Args:
        root: The user's module, e.g. a LightningModule.
        name: Dotted name of the module whose layers are divided, or of a list of layers; None finds the layers.
        at_least: How many layers there should be, if layers can be divided further.
        called: Names of modules; lists of layers that have nothing to do with them are not looked at. None: all are.
        opened: Names of layers that are not called themselves; their parts are layers instead.
        whole: Names of modules that are a layer in place of those within them.
        beside: Names of modules that are layers too, where they have nothing to do with others.

    Raises:
        ConfigurationError: If there is no module of that name with layers, or none with parameters for several stages.
    """
    layers = _named_layers(root, name) if name is not None else _find_layers(root, called)
    layers = _divide_heavy(layers, at_least)
    layers = [part for item in layers for part in (_children_with_parameters(*item) if item[0] in opened else [item])]
    for path in whole:
        layers = _as_one(root, path, layers)
    if whole and len(layers) < at_least:
        layers = _in_order(root, [*layers, *_beside(root, layers)])
    for path in beside:
        if not any(_is_within(path, name) for name, _ in layers):
            layers = [*layers, (path, root.get_submodule(path))]
    layers = _in_order(root, layers) if beside else layers
    if not layers and at_least > 1:
        raise ConfigurationError(
            f"{type(root).__name__} has no module with parameters that a step calls and that can be split into stages. "
            f"Hold its layers as attributes, in an nn.Sequential or in an nn.ModuleList."
        )
    units = list(_units_in(root, "", {id(module): path for path, module in layers}))
    counted = tuple(unit for unit in units if unit.is_layer)
    return Units(_common_path([unit.name for unit in counted]), units, counted)


def _as_one(root: nn.Module, path: str, layers: list[Named]) -> list[Named]:
    within = [index for index, (name, _) in enumerate(layers) if name.startswith(f"{path}.")]
    if not within:
        return layers
    others = [item for index, item in enumerate(layers) if index not in within[1:]]
    others[within[0]] = (path, root.get_submodule(path))
    return others


def _beside(root: nn.Module, layers: list[Named]) -> list[Named]:
    """Layers that are not within others, however small they are."""

    def is_apart(path: str) -> bool:
        return not any(_is_within(path, name) or _is_within(name, path) for name, _ in layers)

    lists = [(path, module) for path, module in _lists_in("", root) if _count(module) and is_apart(path)]
    if lists:
        return [item for path, module in lists for item in _items(path, module)]
    return [item for item in _children_with_parameters("", root) if is_apart(item[0])]


def units_of(unit: Unit) -> list[Unit]:
    """The parts of a unit as units."""
    return list(_units_in(unit.module, unit.name, {}))


Named = tuple[str, nn.Module]


def _is_within(one: str, other: str) -> bool:
    """Whether one of two modules is the other, or a part of it, by their names."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _named_layers(root: nn.Module, name: str) -> list[Named]:
    try:
        module = root.get_submodule(name)
    except AttributeError:
        module = None
    found = [] if module is None else _items(name, module) if _is_list(module) else _layers_below(name, module)
    if not found:
        is_what = "nothing" if module is None else f"a {type(module).__name__} without layers"
        raise ConfigurationError(
            f"pipeline_module names a module of {type(root).__name__} with layers to divide; {name!r} is {is_what}. "
            f"Leave it out to divide all, or name one of: {', '.join(_candidates(root)) or 'nothing has layers'}."
        )
    return found


def _find_layers(root: nn.Module, called: Collection[str] | None) -> list[Named]:
    """The items of all lists with a share of the parameters, and what is heavier than they are."""
    lists = [(path, module) for path, module in _lists_in("", root) if _count(module)]
    if called is not None:
        lists = [(path, module) for path, module in lists if any(_is_within(path, one) for one in called)]
    if not lists:
        children = _children_with_parameters("", root)
        return [item for item in children if called is None or any(_is_within(item[0], one) for one in called)]
    weights = [_count(module) for _, module in lists]
    chosen = [item for item, weight in zip(lists, weights, strict=True) if weight >= _LEAST_SHARE * sum(weights)]
    layers = [item for path, module in chosen for item in _items(path, module)]
    mean = sum(_count(module) for _, module in layers) / len(layers)
    within = {id(part) for _, module in lists for part in module.modules()}
    beside = [
        (path, module)
        for path, module in root.named_modules()
        if id(module) not in within
        and not any(_lists_in(path, module))
        and _owns_most(module)
        and not isinstance(module, (nn.Embedding, nn.EmbeddingBag, nn.Linear))
        and _count(module) > mean
    ]
    return _in_order(root, [*layers, *beside])


def _owns_most(module: nn.Module) -> bool:
    """Whether a module computes with parameters of its own, such as an LSTM."""
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return 2 * own > _count(module) > 0


def _layers_below(path: str, module: nn.Module) -> list[Named]:
    found = [item for list_path, each in _lists_in(path, module) for item in _items(list_path, each)]
    return found or _children_with_parameters(path, module)


def _children_with_parameters(path: str, module: nn.Module) -> list[Named]:
    children: list[Named] = []
    for key, child in _parts(module):
        name = _join(path, key)
        inside = _children_with_parameters(name, child) if _is_empty(child) else [(name, child)]
        children += [item for item in inside if _count(item[1])]
    if len(children) == 1 and _parts(children[0][1]):
        return _children_with_parameters(*children[0])
    return children


def _divide_heavy(layers: list[Named], at_least: int) -> list[Named]:
    """Replace layers that are much heavier than others by the layers in their own lists; too few by their parts."""
    while layers:
        mean = sum(_count(module) for _, module in layers) / len(layers)
        heaviest = sorted(layers, key=lambda item: _count(item[1]), reverse=True)
        for path, module in heaviest:
            parts = _layers_below(path, module) if _parts(module) else []
            is_heavy = _count(module) > _HEAVY * mean and 2 * sum(_count(part) for _, part in parts) > _count(module)
            has_lists = any(_lists_in(path, module)) or _is_list(module)
            if _is_list(module):
                parts = _items(path, module)
            if len(parts) > 1 and ((is_heavy and has_lists) or len(layers) < at_least):
                index = layers.index((path, module))
                layers = [*layers[:index], *parts, *layers[index + 1 :]]
                break
        else:
            return layers
    return layers


def _units_in(module: nn.Module, path: str, layers: dict[int, str]) -> Iterator[Unit]:
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[Unit]:
        for key, child in children_of(module).items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            name = _join(path, key)
            is_layer = id(child) in layers
            holds_layers = any(id(part) in layers for part in child.modules() if part is not child)
            listened = _is_listened(child)
            if is_layer and not listened:
                yield Unit(name, child, is_layer=True)
            elif is_layer:
                yield Unit(name, child, is_layer=True, followed_into=True)
                yield from walk(child, name)
            elif holds_layers or listened or _is_never_called(child):
                yield from walk(child, name)
            elif not _is_metric(child):
                yield Unit(name, child)

    return walk(module, path)


def _is_listened(module: nn.Module) -> bool:
    """Whether somebody hooks into a part of a module, but torch itself, or a part is a metric.

    Hooks see what the part returns; metrics count on the last stage.
    """
    return any(
        _is_metric(part)
        or any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in forward_hooks_of(part))
        for part in module.modules()
        if part is not module
    )


def _is_metric(module: nn.Module) -> bool:
    # the class is asked: modules may answer for any name, or raise what they like
    return all(callable(getattr(type(module), name, None)) for name in ("update", "compute", "reset"))


def _is_never_called(module: nn.Module) -> bool:
    """Whether a module only holds others; classes of lists may have a `forward` of their own."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward
    return is_list or _is_empty(module)


def _is_empty(module: nn.Module) -> bool:
    """Whether a module is one of no class of its own, as torch.fx makes them for paths of layers."""
    return type(module) is nn.Module and "forward" not in vars(module)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList))


def _items(path: str, module: nn.Module) -> list[Named]:
    """The items of a list; lists cannot be called, so of a list of lists their items."""
    found: list[Named] = []
    for key, item in children_of(module).items():
        if isinstance(item, nn.ModuleList) and _is_never_called(item):
            found += _items(_join(path, key), item)
        elif item is not None:
            found.append((_join(path, key), item))
    return found


def _parts(module: nn.Module) -> list[Named]:
    """What a module itself holds, but not what makes its parameters."""
    made = is_parametrized(module)
    return [(key, child) for key, child in module.named_children() if not made or key != "parametrizations"]


def _lists_in(path: str, module: nn.Module) -> Iterator[Named]:
    """The outermost lists of layers below a module."""
    for key, child in _parts(module):
        name = _join(path, key)
        if _is_list(child):
            if any(True for _ in child.children()):
                yield name, child
        else:
            yield from _lists_in(name, child)


def _in_order(root: nn.Module, layers: Sequence[Named]) -> list[Named]:
    order = {id(module): index for index, (_, module) in enumerate(root.named_modules())}
    return sorted(layers, key=lambda item: order[id(item[1])])


def _candidates(root: nn.Module) -> list[str]:
    return [repr(path) for path, module in _lists_in("", root) if _count(module)]


def _common_path(names: Sequence[str]) -> str:
    parts = [name.split(".")[:-1] for name in names] or [[]]
    common = parts[0]
    for other in parts[1:]:
        common = [a for a, b in zip(common, other, strict=False) if a == b][: len(other)]
    return ".".join(common)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
