"""What the package calls of models although it is not public; see `strategy.compat`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from lightning_pfo.strategy.compat.patches import Patches

if TYPE_CHECKING:
    from torchmetrics import Metric

SEEN_IN = "transformers 5.20 to 5.23, torch 2.6 to 2.15, lightning 2.5 to 2.6, torchmetrics 1.9"
PRIVATE = {
    "transformers.PreTrainedModel._init_weights": (
        "Hugging Face models could not be made from the meta device: their layers have no initialisation of their own."
    ),
    "transformers.modeling_layers.GradientCheckpointingLayer._gradient_checkpointing_func": (
        "Layers of Hugging Face models would keep activations although activation_checkpointing=True; their public "
        "method changes the whole model for good."
    ),
    "lightning.pytorch.Trainer._logger_connector": (
        "What a step writes into trainer.callback_metrics itself would be that of a microbatch, or nothing."
    ),
    "lightning.pytorch.Trainer._results": (
        "A training step would find nothing of what it has logged in trainer.callback_metrics in the first batch."
    ),
    "torchmetrics.Metric._reductions": (
        "A metric of means would be told of each microbatch, and take the mean of what these come to, however large."
    ),
    "torch.nn.MultiheadAttention._reset_parameters": (
        "nn.MultiheadAttention could not be made from the meta device: it has no `reset_parameters`."
    ),
}
"""Private names, and what they are needed for."""

Initialiser = Callable[[nn.Module], None]


def initialiser_of(model: nn.Module) -> Initialiser | None:
    """What initialises a module inside a Hugging Face model; None of other models."""
    initialise = getattr(model, "_init_weights", None)
    return initialise if callable(initialise) else None


def own_initialiser(module: nn.Module) -> Callable[[], Any] | None:
    """What initialises the tensors that a module itself holds; None if it has no such method."""
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def checkpoint_with(model: nn.Module, recompute: Callable[..., Any], patches: Patches) -> None:
    """Let those modules of a Hugging Face model that can recompute activations do so."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", None) is False:
            patches.set(module, "gradient_checkpointing", True)
            patches.set(module, "_gradient_checkpointing_func", recompute)


def metrics_of(trainer: Any) -> dict[str, dict[str, Any]]:
    """The dicts of metrics of a Lightning Trainer by name; its properties would compute metrics first."""
    held = getattr(trainer, "_logger_connector", None)
    found = {name: getattr(held, f"_{name}", None) for name in METRICS}
    return {name: metrics for name, metrics in found.items() if isinstance(metrics, dict)}


def hold_metrics(trainer: Any, name: str, metrics: dict[str, Any]) -> None:
    """Let a Lightning Trainer have another of these dicts."""
    setattr(trainer._logger_connector, f"_{name}", metrics)


def has_logged(trainer: Any) -> bool:
    """Whether a Lightning Trainer has results of what was logged in this epoch, out of which it makes metrics."""
    return bool(getattr(trainer, "_results", None))


METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def needs_whole_batches(metric: Metric) -> bool:
    """Whether what a metric comes to depends on how samples are divided into updates.

    So it is where torchmetrics takes the mean of a state over updates, stacks it, or the class says how it is reduced.
    """
    utilities = sys.modules["torchmetrics"].utilities
    exact = {getattr(utilities, f"dim_zero_{name}") for name in ("sum", "max", "min", "cat")}
    reductions: Mapping[str, Any] = metric._reductions
    states = metric.metric_state
    return any(how not in exact and not isinstance(states[name], list) for name, how in reductions.items())
