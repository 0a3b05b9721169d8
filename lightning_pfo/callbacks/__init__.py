"""Lightning callbacks that profile a pipeline's energy and apply frequency plans, and their listeners."""

from lightning_pfo.callbacks.energy_profiler import EnergyProfilerCallback
from lightning_pfo.callbacks.frequency_plan import FrequencyPlanCallback

__all__ = ["EnergyProfilerCallback", "FrequencyPlanCallback"]
