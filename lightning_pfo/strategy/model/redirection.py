"""Calls of a model's modules, led elsewhere for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pfo.strategy.model.find import Site
from lightning_pfo.strategy.parallel.compat import children_of

Call = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""What runs in place of a module: takes the module and the arguments of its call."""


class Redirection(nn.Module):
    """Takes the place of a module in its parent for a while; its attributes are those of the module.

    Args:
        site: The module and its place.
        call: What runs when the module is called.
        on_attribute: Called with each attribute that is read.
    """

    def __init__(self, site: Site, call: Call, on_attribute: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.__dict__.update(_site=site, _call=call, _on_attribute=on_attribute)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the module's call."""
        return self._call(self._site.module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_site"].module, name)
        if self.__dict__["_on_attribute"] is not None:
            self.__dict__["_on_attribute"](value)
        return value


@contextmanager
def redirected(redirections: Sequence[Redirection]) -> Iterator[None]:
    """Put redirections in place while the context is open."""
    for redirection in redirections:
        site = redirection._site
        redirection.__dict__["training"] = site.module.training
        children_of(site.parent)[site.key] = redirection
    try:
        yield
    finally:
        for redirection in redirections:
            site = redirection._site
            children_of(site.parent)[site.key] = site.module
