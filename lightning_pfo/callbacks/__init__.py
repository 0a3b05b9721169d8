"""Lightning callbacks that profile the energy of a pipeline and apply frequency plans: glue around `listeners`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfo.callbacks.energy_profiler import EnergyProfilerCallback
    from lightning_pfo.callbacks.frequency_plan import FrequencyPlanCallback
    from lightning_pfo.callbacks.optimizer import PipelineFrequencyOptimizerCallback
    from lightning_pfo.callbacks.plan_sweep import PlanSweepCallback

_MODULE_OF = {
    "EnergyProfilerCallback": "energy_profiler",
    "FrequencyPlanCallback": "frequency_plan",
    "PipelineFrequencyOptimizerCallback": "optimizer",
    "PlanSweepCallback": "plan_sweep",
}

__all__ = [
    "EnergyProfilerCallback",
    "FrequencyPlanCallback",
    "PipelineFrequencyOptimizerCallback",
    "PlanSweepCallback",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # here: plain loops do not wait for Lightning
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
