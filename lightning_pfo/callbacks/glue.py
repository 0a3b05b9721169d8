"""What the callbacks share: finding the pipeline behind a Trainer, and ending a run whatever ends the training."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionSource


class _Closeable(Protocol):
    def close(self) -> None: ...


Run = TypeVar("Run", bound=_Closeable)


class RunCallback(Callback, Generic[Run]):
    """Base of callbacks that are glue around a plain run: closes it at the end, on an exception and at teardown."""

    _run: Run | None = None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._close()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._run is not None:
            self._run.close()


def instruction_source_of(trainer: pl.Trainer, callback: object) -> InstructionSource:
    """Return the pipeline rank that the Trainer's strategy runs.

    Raises:
        ConfigurationError: If the strategy does not emit instruction events.
    """
    source: Any = getattr(trainer.strategy, "instruction_source", None)
    if source is None:
        raise ConfigurationError(
            f"{type(callback).__name__} listens to the instructions of a pipeline, which "
            f"{type(trainer.strategy).__name__} does not emit. Use Trainer(strategy='pfo_pipeline')."
        )
    found: InstructionSource = source
    return found


def ranks_per_node(trainer: pl.Trainer) -> int:
    """How many pipeline ranks run on this node."""
    return trainer.num_devices
