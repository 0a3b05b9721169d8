"""The schema of the files in `conf/`, for scripts; it lives in `lightning_pfo.experiment.config`."""

from lightning_pfo.experiment.config import (
    ExperimentConfig,
    PlanConfig,
    ProfilerConfig,
    ScheduleConfig,
    TrainerConfig,
)

__all__ = ["ExperimentConfig", "PlanConfig", "ProfilerConfig", "ScheduleConfig", "TrainerConfig"]
