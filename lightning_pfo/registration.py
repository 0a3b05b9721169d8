"""Makes `strategy="pfo_pipeline"` and its variants known to Lightning without importing Lightning.

Lightning looks a strategy name up in its registry, and has no entry point that is read early enough. Where Lightning is
imported already the name is registered at once, otherwise as soon as Lightning's strategies have been imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

STRATEGIES = {
    "pfo_pipeline": "popen",
    "pfo_pipeline_spawn": "spawn",
    "pfo_pipeline_fork": "fork",
    "pfo_pipeline_notebook": "fork",
}
"""Names for `Trainer(strategy=...)`, named as Lightning names its DDP, and how processes are started."""
_STRATEGIES_MODULE = "lightning.pytorch.strategies"


def register_when_lightning_is_imported() -> None:
    """Register the strategy now, or when `lightning.pytorch.strategies` is imported."""
    module = sys.modules.get(_STRATEGIES_MODULE)
    if module is not None and hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _StrategiesFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StrategiesFinder())


def _register(strategies: ModuleType) -> None:
    for name, start_method in STRATEGIES.items():
        if name not in strategies.StrategyRegistry:
            strategies.StrategyRegistry.register(
                name,
                _make_strategy,
                description=f"Pipeline parallelism for least-energy training, start_method={start_method!r}",
                start_method=start_method,
            )


def _make_strategy(**kwargs: Any) -> Any:
    from lightning_pfo.strategy import PfoPipelineStrategy

    return PfoPipelineStrategy(**kwargs)


class _StrategiesFinder(importlib.abc.MetaPathFinder):
    """Lets the other finders find the strategies module, and registers our name after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _STRATEGIES_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
