"""The decorator that makes a script of a function, for scripts; it lives in `lightning_pfo.experiment.hydra_main`."""

from lightning_pfo.experiment.hydra_main import hydra_main

__all__ = ["hydra_main"]
