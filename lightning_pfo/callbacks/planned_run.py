"""The former place of `lightning_pfo.listeners.planned_run`, kept as it was documented."""

from lightning_pfo.listeners.planned_run import PlannedRun

__all__ = ["PlannedRun"]
