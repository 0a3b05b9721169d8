"""`example_input_array`, with which Lightning's summaries and loggers call the whole module: not while it is split."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info


def set_example_aside(module: pl.LightningModule) -> Any:
    """Take the example away from a module, and return it for `give_example_back`."""
    example = module.example_input_array
    if example is not None:
        module.example_input_array = None
        rank_zero_info(
            "pfo_pipeline: example_input_array is not used while the model is split, because no process can call all "
            "of it: summaries have no sizes of inputs and outputs, and loggers no graph."
        )
    return example


def give_example_back(module: pl.LightningModule, example: Any) -> None:
    """Undo `set_example_aside`."""
    if example is not None:
        module.example_input_array = example
