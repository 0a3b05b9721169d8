"""Train a (Wide-)ResNet on images of handwritten digits, and see what a frequency plan saves.

python examples/resnet/train.py
python examples/resnet/train.py model=wide_resnet gpu.forward_s=0.1
python examples/resnet/train.py model=wide_resnet50_2
python examples/resnet/train.py --help
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from lightning_pfo.config import ExperimentConfig
from lightning_pfo.experiment import run_experiment
from lightning_pfo.hydra_app import hydra_main

from data import Digits, DigitsConfig
from model import ModelConfig, ResNet, ResNetConfig
from torchvision_models import Classifier, TorchvisionConfig


@dataclass
class Config(ExperimentConfig):
    """An experiment with a ResNet, or a classifier of torchvision."""

    model: ModelConfig = MISSING
    data: DigitsConfig = MISSING


def make_model(config: ModelConfig) -> ResNet | Classifier:
    """Make the model that the config is for."""
    if isinstance(config, TorchvisionConfig):
        return Classifier(config)
    assert isinstance(config, ResNetConfig)
    return ResNet(config)


@hydra_main("resnet", Config, {"model/schema/resnet": ResNetConfig, "model/schema/torchvision": TorchvisionConfig})
def main(config: Config) -> None:
    """Run the experiment."""
    run_experiment(config, lambda: make_model(config.model), lambda: Digits(config.data))


if __name__ == "__main__":
    main()
