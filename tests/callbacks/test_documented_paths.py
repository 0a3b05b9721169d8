"""Import paths that the documentation has named stay."""

import lightning_pfo.callbacks
import lightning_pfo.callbacks.planned_run
import lightning_pfo.callbacks.profiling_run
from lightning_pfo import listeners


def test_runs_of_plain_loops_are_found_where_they_were():
    assert lightning_pfo.callbacks.planned_run.PlannedRun is listeners.PlannedRun
    assert lightning_pfo.callbacks.profiling_run.ProfilingRun is listeners.ProfilingRun
    assert lightning_pfo.callbacks.profiling_run.ScanSettings is listeners.ScanSettings


def test_callbacks_are_found_in_the_package():
    assert lightning_pfo.callbacks.EnergyProfilerCallback.__module__ == "lightning_pfo.callbacks.energy_profiler"
    assert lightning_pfo.callbacks.FrequencyPlanCallback.__module__ == "lightning_pfo.callbacks.frequency_plan"
