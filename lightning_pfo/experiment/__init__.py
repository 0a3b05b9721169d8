"""The main job: profile, plan, train at the top clocks and under the plan, report what was saved."""

from lightning_pfo.experiment.run import run_experiment

__all__ = ["run_experiment"]
