"""What hears a pipeline's instructions and does something about clocks and energy; without Lightning.

`ProfilingRun` measures a profile, `PlannedRun` applies a plan and `OptimizedRun` does both, in any training loop that
has an instruction source; `lightning_pfo.callbacks` are the same in a Trainer. Read in this order:

1. `profiling_run`, `planned_run`: what a training loop opens and closes;
2. `frequency_scan`: the scan of a profiling run, clock by clock; `profile_row`: what it measures; `drift`: what a GPU
   that warms up does to it; `plan_cursor`: the next clock of a planned run;
   `online_envpipe`: plans that change with what was measured;
3. `meters`: time and energy of instructions and of iterations;
4. `clock_requests`: asking for clocks in time; `device_follower`: when the GPU gets somewhere, as the host runs ahead;
5. `gpu_session`: the GPU of a rank, shared by those who use it; `emulated`: modelled ones under the pipeline;
6. `agreement`: problems of one rank that end the run on all;
7. `windows`: iterations at the top clocks and under a plan in turn; `optimizer`: one run that optimises itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pfo.listeners.online_envpipe import OnlineEnvPipe
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings

if TYPE_CHECKING:
    from lightning_pfo.listeners.optimizer.run import OptimizedRun
    from lightning_pfo.listeners.optimizer.settings import OptimizerSettings

_LATER = {"OptimizedRun": "run", "OptimizerSettings": "settings"}  # the planner takes its time to import

__all__ = ["OnlineEnvPipe", "OptimizedRun", "OptimizerSettings", "PlannedRun", "ProfilingRun", "ScanSettings"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.optimizer.{_LATER[name]}"), name)
