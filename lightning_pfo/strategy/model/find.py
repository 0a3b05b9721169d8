"""Finding the module to split, and its layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.parallel.compat import children_of


@dataclass(frozen=True)
class Site:
    """A module and where its parent holds it."""

    parent: nn.Module
    key: str
    module: nn.Module


@dataclass(frozen=True)
class PipelinedModule:
    """A module whose call the pipeline runs.

    It is an `nn.Sequential`, whose layers a stage runs one after the other, or a module with a tower: `nn.ModuleList`s
    of layers that its own `forward` calls one after the other. Of a tower each stage runs the module's `forward`.

    Attributes:
        name: Dotted name in the user's module; empty for the user's module itself.
        module: The module.
        layers: Its layers, in the order in which they are called.
        surroundings: Of a tower the other modules with parameters: embeddings, final norms, heads.
    """

    name: str
    module: nn.Module
    layers: tuple[Site, ...]
    surroundings: tuple[Site, ...] = ()

    @property
    def is_tower(self) -> bool:
        """Whether stages run the module's own `forward`."""
        return not isinstance(self.module, nn.Sequential)


def find_pipelined_module(root: nn.Module, name: str | None = None) -> PipelinedModule:
    """Find the module to split.

    Args:
        root: The user's module, e.g. a LightningModule.
        name: Dotted name of an `nn.Sequential`, of an `nn.ModuleList` (then its parent is called), or of a module that
            holds such lists. None searches: the one `nn.Sequential` among the children of `root`, or else the one child
            that holds `nn.ModuleList`s or grandchild that is an `nn.Sequential`, or else `root` if it holds an
            `nn.ModuleList` itself.

    Raises:
        ConfigurationError: If the name is wrong, or the search finds nothing or several; lists the candidates.
    """
    if name is not None:
        found = _named(root, name)
        if found is None:
            raise ConfigurationError(
                f"pipeline_module names an nn.Sequential of {type(root).__name__}, an nn.ModuleList of layers or a "
                f"module that has one; {name!r} is {_kind_of(root, name)}. {_candidates(root)}"
            )
        return found
    children = [(path, module) for path, module in root.named_children() if not isinstance(module, nn.ModuleList)]
    sequentials = [path for path, module in children if isinstance(module, nn.Sequential)]
    towers = [path for path, module in children if any(_lists_in(module))]
    towers += [
        f"{path}.{key}"
        for path, module in children
        for key, child in module.named_children()
        if isinstance(child, nn.Sequential) and not isinstance(module, nn.ModuleList)
    ]
    itself = [""] if any(isinstance(child, nn.ModuleList) for child in root.children()) else []
    for level in (sequentials, towers, itself):
        if len(level) > 1:
            raise ConfigurationError(
                f"{type(root).__name__} has more than one module to split into stages, so which to split is ambiguous. "
                f"Name it: PfoPipelineStrategy(pipeline_module={level[0]!r}). {_candidates(root)}"
            )
        found = _named(root, level[0]) if level else None
        if found is not None:
            return found
    raise ConfigurationError(
        f"{type(root).__name__} has no nn.Sequential and no nn.ModuleList of layers to split into stages. Hold the "
        f"layers in one, e.g. self.model = nn.Sequential(...), or name it: PfoPipelineStrategy(pipeline_module=...). "
        f"{_candidates(root)}"
    )


def calls_its_layers(module: nn.Module) -> bool:
    """Whether a module as a whole can be split: it is an `nn.Sequential`, or holds lists of layers and no such one."""
    children = list(module.children())
    holds_sequential = any(isinstance(child, nn.Sequential) for child in children)
    return isinstance(module, nn.Sequential) or (any(_lists_in(module)) and not holds_sequential)


def _named(root: nn.Module, name: str) -> PipelinedModule | None:
    try:
        module = root.get_submodule(name)
    except AttributeError:
        return None
    if isinstance(module, nn.Sequential):
        return PipelinedModule(name, module, _sites(module))
    if isinstance(module, nn.ModuleList):
        name = name.rpartition(".")[0]
        lists = [module]
        module = root.get_submodule(name)
    else:
        lists = list(_lists_in(module))
    layers = tuple(site for layer_list in lists for site in _sites(layer_list))
    if not layers:
        return None
    return PipelinedModule(name, module, layers, tuple(_surroundings(module, {id(site.module) for site in layers})))


def _sites(parent: nn.Module) -> tuple[Site, ...]:
    return tuple(Site(parent, key, module) for key, module in children_of(parent).items() if module is not None)


def _lists_in(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of layers; what is inside an `nn.Sequential` is called by it."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        elif not isinstance(child, nn.Sequential):
            yield from _lists_in(child)


def _surroundings(parent: nn.Module, layers: set[int]) -> Iterator[Site]:
    for site in _sites(parent):
        if id(site.module) in layers:
            continue
        holds_layers = any(id(module) in layers for module in site.module.modules())
        if holds_layers or isinstance(site.module, (nn.ModuleList, nn.ModuleDict)):  # those are not called
            yield from _surroundings(site.module, layers)
        elif any(True for _ in site.module.parameters()):
            yield site


def _kind_of(root: nn.Module, name: str) -> str:
    try:
        return f"a {type(root.get_submodule(name)).__name__}"
    except AttributeError:
        return "nothing"


def _candidates(root: nn.Module) -> str:
    outermost: dict[str, int] = {}
    for path, module in root.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in outermost)
        if path and not inside and isinstance(module, (nn.Sequential, nn.ModuleList)):
            outermost[path] = len(module)
    names = [f"{path!r} ({length} layers)" for path, length in outermost.items()]
    return f"Candidates: {', '.join(names)}." if names else "It contains neither."
