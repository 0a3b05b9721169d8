"""Train a byte-level GPT on the sources of Python's standard library, and see what a frequency plan saves.

python examples/gpt/train.py
python examples/gpt/train.py gpu=emulated_a40 plan=slowdown_2_percent trainer.devices=2
python examples/gpt/train.py --help
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from lightning_pfo.config import ExperimentConfig
from lightning_pfo.experiment import run_experiment
from lightning_pfo.hydra_app import hydra_main

from data import StdlibText, TextConfig
from model import Gpt, GptConfig


@dataclass
class Config(ExperimentConfig):
    """An experiment with a GPT."""

    model: GptConfig = MISSING
    data: TextConfig = MISSING


@hydra_main("gpt", Config)
def main(config: Config) -> None:
    """Run the experiment."""
    run_experiment(config, lambda: Gpt(config.model), lambda: StdlibText(config.data))


if __name__ == "__main__":
    main()
