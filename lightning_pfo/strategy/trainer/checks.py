"""What a Trainer may be asked for that a pipeline cannot do: refused before training with a way out, left out, told."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import counted, shortened
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.coupling import check_optimizer
from lightning_pfo.strategy.model.layers import check_compiler
from lightning_pfo.strategy.model.tracing.placeholders import check_values
from lightning_pfo.strategy.model.variables import is_library, packages_of, users_line
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.effects.outward import collectives
from lightning_pfo.strategy.step.effects.within import step_ends_here
from lightning_pfo.strategy.trainer.callbacks.weight_averaging import check_averages
from lightning_pfo.strategy.trainer.precision import check_precision


def check_configuration(
    trainer: pl.Trainer,
    device: torch.device,
    *,
    synchronises_batch_norm: bool,
    is_divided: bool,
    divides_layers: bool,
    compiles: bool,
    shards_checkpoints: bool = False,
) -> None:
    """Check the Trainer's options.

    Args:
        trainer: The Trainer.
        device: This rank's device.
        synchronises_batch_norm: Whether `sync_batchnorm=True` was given.
        is_divided: Whether this rank holds a part of the module.
        divides_layers: Whether layers are divided over processes, by tensor parallelism or FSDP2.
        compiles: Whether layers are compiled.
        shards_checkpoints: Whether checkpoints are written in shards.

    Raises:
        ConfigurationError: If they cannot work on a pipeline.
    """
    if synchronises_batch_norm:
        raise ConfigurationError(
            "pfo_pipeline runs batch norm on microbatches, each replica with its own; got sync_batchnorm=True. Leave "
            "it out, or use a norm that does not look at other samples, such as nn.GroupNorm or nn.LayerNorm."
        )
    check_precision(trainer.precision_plugin)
    if compiles:
        check_compiler(device)
    check_averages(trainer, divided=divides_layers, sharded_checkpoints=shards_checkpoints)
    if is_divided and any(isinstance(callback, ModelPruning) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "ModelPruning reads and replaces the weights of all layers, but a pipeline rank holds those of its own "
            "stages. Prune the checkpoint on one device, or leave the callback out."
        )
    if is_divided and any(map(_serves, trainer.callbacks)):  # type: ignore[attr-defined]
        raise ConfigurationError(
            "ServableModuleValidator calls the whole module in a process that it starts on the first rank, but a "
            "pipeline rank holds the layers of its own stages. Leave the callback out, and validate on one device "
            "before (fast_dev_run=True); or serve what trainer.strategy.gather_module() gives after fit."
        )


def _serves(callback: object) -> bool:
    """Whether a callback is `ServableModuleValidator`, whose module imports what few have installed (requests)."""
    return any(kind.__name__ == "ServableModuleValidator" for kind in type(callback).__mro__)


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers can make their steps from the parameters of one rank; warn of those that make others so.

    Raises:
        ConfigurationError: If not.
    """
    for optimizer in optimizers:
        if warning := check_optimizer(optimizer, "trainer.strategy.grad_norm()"):
            rank_zero_warn(f"pfo_pipeline: {warning}")


def set_example_aside(module: pl.LightningModule, patches: Patches) -> None:
    """Take `example_input_array` away, with which Lightning's summaries and loggers call the whole module."""
    example = module.example_input_array
    if example is None:
        return
    module.example_input_array = None
    patches.callback(setattr, module, "example_input_array", example)
    rank_zero_info(
        "pfo_pipeline: example_input_array is not used while the model is split, because no process can call all "
        "of it: summaries have no sizes of inputs and outputs, and loggers no graph."
    )


def refuse_missing_values(patches: Patches) -> None:
    """Let `self.log` in hooks refuse what comes of layers of other ranks: Lightning would at the end of the run.

    Args:
        patches: Undoes it.
    """
    ordinary = pl.LightningModule.log

    @wraps(ordinary)
    def log(module: pl.LightningModule, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        check_values(value)
        ordinary(module, name, value, *args, **kwargs)

    patches.set(pl.LightningModule, "log", log)


def tell_of_counts(module: pl.LightningModule, num_replicas: int, patches: Patches) -> None:
    """Name the user's lines that read how many processes there are: as a factor of a learning rate it is another one.

    Args:
        module: The user's module.
        num_replicas: How many batches are read at a time.
        patches: Undoes it.
    """
    told: set[tuple[str, int, str]] = set()
    packages = packages_of(module)

    def read(name: str, ordinary: Any, *args: Any) -> Any:
        number = ordinary(*args)
        asking: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
        while asking.f_globals.get("__name__") in (__name__, collectives.__name__):  # what stands before torch's
            asking = asking.f_back
        package = str(asking.f_globals.get("__name__"))
        place = asking.f_code.co_filename, asking.f_lineno, name
        if place in told or (package.partition(".")[0] not in packages and is_library(package)):
            return number
        told.add(place)
        line = users_line()
        asks_only = re.search(rf"\b{re.escape(name.rpartition('.')[2])}\s*[<>=!]=?", line)  # whether there are several
        if not asks_only:
            warn_once(
                f"{line} reads {name}, which is {number}, a number of processes. All of them together hold "
                f"{counted(num_replicas, 'replica')} of the model, and as many batches are read at a time: scale "
                f"learning rates, queues and numbers of steps by trainer.strategy.data_parallel_size "
                f"({num_replicas}). Where processes are meant, all is well."
            )
        return number

    for owner, attribute, name in (
        (pl.Trainer, "num_devices", "trainer.num_devices"),
        (pl.Trainer, "world_size", "trainer.world_size"),
        (ParallelStrategy, "world_size", "trainer.strategy.world_size"),
    ):
        patches.set(owner, attribute, property(partial(read, name, vars(owner)[attribute].fget)))
    ordinary = dist.get_world_size

    @wraps(ordinary)
    def get_world_size(group: dist.ProcessGroup | None = None) -> int:
        number: int = ordinary(group) if group else read("torch.distributed.get_world_size()", ordinary)
        return number

    patches.set(dist, "get_world_size", get_world_size)


def tell_of_state(patches: Patches) -> None:
    """Name the user's line that looks in a step at an optimizer's state: a rank has that of its own parameters.

    Args:
        patches: Undoes it.
    """
    ordinary = LightningOptimizer.__getattr__

    def read(optimizer: LightningOptimizer, name: str) -> Any:
        if name == "state" and step_ends_here():
            warn_once(
                f"{users_line()} looks at the state of an optimizer, and each rank has that of its own parameters: "
                f"here that of the last stage. Look at it in a hook, such as on_before_zero_grad, where each rank has "
                f"its part; trainer.save_checkpoint(path) puts all of it together."
            )
        return ordinary(optimizer, name)

    patches.set(LightningOptimizer, "__getattr__", read)


class InvalidOutputError(ConfigurationError, MisconfigurationException):
    """A training step has returned what holds no loss: Lightning's error too."""


def with_checked_output(step: Callable[..., Any]) -> Callable[..., Any]:
    """A training step of automatic optimization that raises an `InvalidOutputError` where Lightning would."""

    def run(*args: Any) -> Any:
        result = step(*args)
        if result is None or isinstance(result, torch.Tensor) or (isinstance(result, Mapping) and "loss" in result):
            return result
        raise InvalidOutputError(
            "In automatic optimization, when `training_step` returns a dict, the 'loss' key needs to be present; got "
            f"the keys {list(result)}. Return the loss under 'loss', as a tensor of one element."
            if isinstance(result, Mapping)
            else "In automatic optimization, `training_step` must return a Tensor, a dict, or None (where the step "
            f"will be skipped); got {shortened(result)}, a {type(result).__name__}. Return the loss as a tensor of one "
            f"element that depends on the model's output."
        )

    return run
