"""What hears a pipeline's instructions and does something about clocks and energy; without Lightning.

`ProfilingRun` measures a profile and `PlannedRun` applies a plan, in any training loop that has an instruction source;
`lightning_pfo.callbacks` are the same in a Trainer. Read in this order:

1. `profiling_run`, `planned_run`: what a training loop opens and closes;
2. `frequency_scan`: the scan of a profiling run, clock by clock; `profile_row`: what it measures; `drift`: what a GPU
   that warms up does to it; `plan_cursor`: the next clock of a planned run;
3. `meters`: time and energy of instructions and of iterations;
4. `clock_requests`: asking for clocks in time; `device_follower`: when the GPU gets somewhere, as the host runs ahead;
5. `gpu_session`: the GPU of a rank, shared by those who use it; `emulated`: modelled ones under the pipeline;
6. `agreement`: problems of one rank that end the run on all.
"""

from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings

__all__ = ["PlannedRun", "ProfilingRun", "ScanSettings"]
