"""Train a byte-level language model on the sources of Python's standard library, and see what a frequency plan saves.

python examples/gpt/train.py
python examples/gpt/train.py gpu=emulated_a40 plan=slowdown_2_percent trainer.devices=2
python examples/gpt/train.py model=llama_tiny
python examples/gpt/train.py --help
"""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import MISSING

from lightning_pfo.config import ExperimentConfig
from lightning_pfo.experiment import run_experiment
from lightning_pfo.hydra_app import hydra_main

from data import StdlibText, TextConfig
from huggingface import LanguageModel, TransformersConfig
from model import Gpt, GptConfig, ModelConfig


@dataclass
class Config(ExperimentConfig):
    """An experiment with a GPT, or a language model of transformers."""

    model: ModelConfig = MISSING
    data: TextConfig = MISSING


def make_model(config: ModelConfig) -> Gpt | LanguageModel:
    """Make the model that the config is for."""
    if isinstance(config, TransformersConfig):
        return LanguageModel(config)
    assert isinstance(config, GptConfig)
    return Gpt(config)


@hydra_main("gpt", Config, {"model/schema/gpt": GptConfig, "model/schema/transformers": TransformersConfig})
def main(config: Config) -> None:
    """Run the experiment."""
    run_experiment(config, lambda: make_model(config.model), lambda: StdlibText(config.data))


if __name__ == "__main__":
    main()
