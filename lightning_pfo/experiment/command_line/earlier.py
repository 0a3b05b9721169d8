"""Keeps what an earlier run has left, before Hydra writes the configuration of this one over that of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from lightning_pfo.experiment.earlier import set_aside
from lightning_pfo.experiment.processes import is_first_process


class KeepEarlierResults(Callback):
    """Moves them aside, until it is clear that the run begins (`experiment.earlier`).

    See `hydra.callbacks` in `conf/experiment.yaml`.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Look into the folder of this run."""
        if is_first_process():
            set_aside(Path(config.hydra.run.dir), keep=config.get("profile", ""))
