"""Lightning callbacks that profile the energy of a pipeline and apply frequency plans: glue around `listeners`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pfo.callbacks.energy_profiler import EnergyProfilerCallback
    from lightning_pfo.callbacks.frequency_plan import FrequencyPlanCallback

__all__ = ["EnergyProfilerCallback", "FrequencyPlanCallback"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_pfo.callbacks import energy_profiler, frequency_plan  # here: plain loops do not wait for Lightning

    return getattr(energy_profiler, name, None) or getattr(frequency_plan, name)
