"""The former place of `lightning_pfo.listeners.profiling_run`, kept as it was documented."""

from lightning_pfo.listeners.profiling_run import ProfilingRun, ScanSettings

__all__ = ["ProfilingRun", "ScanSettings"]
