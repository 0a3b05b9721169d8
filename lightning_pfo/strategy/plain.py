"""Where `PipelinedModel` used to be; it is in `lightning_pfo.loops` now, and scripts that name this module go on."""

from __future__ import annotations

from importlib import import_module


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("lightning_pfo.loops.plain"), name)  # found when used: the strategy knows no loops
