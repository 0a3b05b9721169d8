"""How much a pipeline does in a second, as `ThroughputMonitor` logs it."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_pfo.strategy.trainer.callbacks.compat import throughputs_of


def count_pipelines(trainer: pl.Trainer, num_replicas: int) -> None:
    """Let a pipeline count as one device: its processes work on the same samples, so their numbers do not add up.

    Args:
        trainer: The Trainer, whose callbacks are set up.
        num_replicas: Number of pipelines.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, ThroughputMonitor):
            continue
        for throughput in throughputs_of(callback):
            throughput.world_size = num_replicas
            if callback.available_flops is not None:  # those of one device
                throughput.available_flops = callback.available_flops * trainer.world_size // num_replicas
