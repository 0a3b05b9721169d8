"""The decorator that makes a script of a function; it lives in `lightning_pfo.experiment.command_line`."""

from lightning_pfo.experiment.command_line.hydra_main import hydra_main

__all__ = ["hydra_main"]
