"""Train a (Wide-)ResNet on images of handwritten digits, and see what a frequency plan saves.

python examples/resnet/train.py
python examples/resnet/train.py model=wide_resnet gpu.forward_s=0.1
python examples/resnet/train.py --help
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from lightning_pfo.config import ExperimentConfig
from lightning_pfo.experiment import run_experiment
from lightning_pfo.hydra_app import hydra_main

from data import Digits, DigitsConfig
from model import ResNet, ResNetConfig


@dataclass
class Config(ExperimentConfig):
    """An experiment with a ResNet."""

    model: ResNetConfig = MISSING
    data: DigitsConfig = MISSING


@hydra_main("resnet", Config)
def main(config: Config) -> None:
    """Run the experiment."""
    run_experiment(config, lambda: ResNet(config.model), lambda: Digits(config.data))


if __name__ == "__main__":
    main()
