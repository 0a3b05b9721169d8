"""All that the package uses of Lightning although it is not public; see `strategy.compat`."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as seed_workers
from lightning.fabric.utilities.distributed import _get_default_process_group_backend_for_device as default_backend
from lightning.fabric.utilities.distributed import _init_dist_connection as connect_processes
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as share_threads
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.loops.optimization.automatic import ClosureResult as _ClosureResult
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner import batch_size_scaling
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.memory import is_oom_error
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel.groups import OutOfMemoryElsewhereError

__all__ = ["connect_processes", "default_backend", "seed_workers", "share_threads"]

SEEN_IN = "lightning 2.5 to 2.6"
PRIVATE = {
    "lightning.fabric.utilities.data._auto_add_worker_init_fn": (
        "Workers of data loaders would be seeded by process, and the ranks of a pipeline augment the same batch "
        "differently."
    ),
    "lightning.fabric.utilities.distributed._get_default_process_group_backend_for_device": (
        "The backend of a device would have to be listed here."
    ),
    "lightning.fabric.utilities.distributed._init_dist_connection": (
        "Connecting processes, with Lightning's messages and clean-up, would have to be repeated here."
    ),
    "lightning.fabric.utilities.distributed._set_num_threads_if_needed": (
        "Every process would use as many threads as the machine has cores."
    ),
    "lightning.fabric.utilities.optimizer._optimizers_to_device": (
        "Optimizer states would stay on the CPU after loading."
    ),
    "lightning.pytorch.plugins.io.wrapper._WrappingCheckpointIO": (
        "AsyncCheckpointIO would write by Lightning's own IO, which a crash may leave with half a file."
    ),
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher": (
        "Processes could not be started by running the script again."
    ),
    "lightning.pytorch.strategies.launchers._SubprocessScriptLauncher._call_children_scripts": (
        "`launch` starts processes without telling them who their parent is; they would outlive it."
    ),
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher": "Processes could not be forked or spawned.",
    "lightning.pytorch.strategies.launchers._MultiProcessingLauncher._collect_rank_zero_results": (
        "The calling process would get the weights of the first stage only."
    ),
    "lightning.pytorch.strategies.Strategy._configure_launcher": "A strategy could not bring launchers of its own.",
    "lightning.pytorch.strategies.Strategy._launcher": (
        "A strategy could not bring launchers of its own: it is where Lightning looks for one."
    ),
    "lightning.pytorch.strategies.Strategy._checkpoint_io": (
        "The default could not be a file that is there whole or not at all."
    ),
    "lightning.pytorch.strategies.DDPStrategy._layer_sync": "sync_batchnorm=True would be ignored silently.",
    "lightning.pytorch.LightningModule._device_mesh": "`configure_model` could not use `self.device_mesh`.",
    "lightning.pytorch.LightningModule._on_before_batch_transfer": (
        "The step would be looked at with a first batch of another form than it gets in training."
    ),
    "lightning.pytorch.overrides.distributed._IndexBatchSamplerWrapper": (
        "Ranks that load no batches would not know which samples they predict."
    ),
    "lightning.pytorch.loops.fit_loop._FitLoop._data_source": (
        "partition='profile' would have no batch before training."
    ),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor": (
        "Ranks would wait for each other after every batch to compare signals, the devices too. Lightning 2.5.0 "
        "has no such method, and needs none."
    ),
    "lightning.pytorch.loops.fit_loop._FitLoop._combined_loader": (
        "Parts of a batch that come from several loaders would have to be of one size."
    ),
    "lightning.pytorch.loops.evaluation_loop._EvaluationLoop._store_dataloader_outputs": (
        "Replicas with fewer batches would reduce what is logged while others vote after a batch, and both hang."
    ),
    "lightning.pytorch.Trainer._signal_connector": (
        "SIGTERM would end each rank wherever it is, and the others would wait for it until the timeout."
    ),
    "lightning.pytorch.Trainer._logger_connector": (
        "Ranks could agree to stop only where a callback is called, not after all hooks of a batch."
    ),
    "lightning.pytorch.Trainer._checkpoint_connector": "`on_fit_start` would see weights before they are restored.",
    (
        "lightning.pytorch.trainer.connectors.checkpoint_connector._CheckpointConnector._restore_modules_and_callbacks"
    ): "Likewise, and the user's `weights_only` would be lost.",
    "lightning.pytorch.loops.optimization.automatic.ClosureResult": (
        "A `training_step` could not skip a batch by returning None, which Lightning refuses with several processes."
    ),
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn": (
        "SIGTERM would be handled within the signal handler, between the transfers of a pipeline."
    ),
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._slurm_sigusr_handler_fn": (
        "SLURM's request to be requeued would save from within a signal handler, on each rank at another batch."
    ),
    "lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._should_check_val_fx": (
        "With val_check_interval as a time, each rank would validate when its own clock says so."
    ),
    "lightning.pytorch.tuner.batch_size_scaling._try_loop_run": (
        "Where one rank runs out of memory outside of a step (in optimizer.step()), scaling the batch size would end."
    ),
    "lightning.pytorch.loops.optimization.automatic._AutomaticOptimization._skip_backward": (
        "Gradients would be gone in the batches that StochasticWeightAveraging runs for batch norms alone."
    ),
}
"""Private names, and what they are needed for."""
OLDER_LACK = {"lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._broadcast_sigterm_tensor"}
"""Names that the newest versions have, and the oldest do not, which need none."""


class StrategyBase(ParallelStrategy):
    """`ParallelStrategy` with public names for what a strategy of one's own overrides and looks at."""

    _layer_sync: Any = None  # where the Trainer leaves what sync_batchnorm=True asks for

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether `Trainer(sync_batchnorm=True)` was given."""
        return self._layer_sync is not None

    @abstractmethod
    def make_launcher(self) -> Any:
        """Make what starts the processes."""

    @override
    def _configure_launcher(self) -> None:
        self._launcher = self.make_launcher()

    @abstractmethod
    def make_checkpoint_io(self) -> CheckpointIO:
        """Make what reads and writes checkpoints, where the user gave nothing."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = self.make_checkpoint_io()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = self.make_checkpoint_io()  # the innermost, and only if it has none
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io


class ScriptLauncherBase(_SubprocessScriptLauncher):
    """Runs the script again for each further process."""

    def start_scripts(self) -> None:
        """Start the further processes of this node; they are in `procs` then."""
        self._call_children_scripts()


class ForkLauncherBase(_MultiProcessingLauncher):
    """Forks or spawns processes."""

    def collect_results(self, trainer: pl.Trainer, results: Any) -> Any:
        """In the first process, collect what the calling one is given."""
        return super()._collect_rank_zero_results(trainer, results)

    @override
    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> Any:
        return self.collect_results(trainer, results)


WEIGHTS_ONLY = None if "weights_only" in inspect.signature(pl.Trainer.fit).parameters else False
"""How Lightning reads a checkpoint where a user does not say: from 2.6 on as torch does, before that all of it."""


def move_optimizers(optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Move the states of optimizers to a device; what they began with for parameters of other ranks is left out."""
    optimizers = list(optimizers)
    for optimizer in optimizers:
        for parameter in [key for key in optimizer.state if isinstance(key, torch.Tensor) and key.is_meta]:
            del optimizer.state[parameter]  # as Adagrad's: most begin with nothing
    _optimizers_to_device(optimizers, device)


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Let `module.device_mesh` be `mesh`, for `configure_model`."""
    module._device_mesh = mesh


def training_data(trainer: pl.Trainer) -> Any:
    """The training data as the user gave them: loaders, alone or in lists and dicts."""
    return trainer.fit_loop._data_source.dataloader()


def evaluation_data(trainer: pl.Trainer) -> Any:
    """The data of an evaluation that is about to begin, in the same way."""
    loops: Any = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    return loops[trainer.state.fn]._data_source.dataloader()


def training_loaders(trainer: pl.Trainer) -> CombinedLoader | None:
    """The loaders that training goes through; None before it has made them."""
    return trainer.fit_loop._combined_loader


def noted_indices(loader: Any) -> list[list[int]] | None:
    """Where Lightning notes which samples each batch of a loader for predictions has; None: it does not.

    The list is another one after each begin of the loader, and there is none before the first.
    """
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, _IndexBatchSamplerWrapper):
        return None
    noted: list[list[int]] = vars(sampler).setdefault("seen_batch_indices", [])
    return noted


def before_transfer(module: pl.LightningModule, batch: Any) -> Any:
    """What `on_before_batch_transfer` of a module, or of its data module, makes of a batch."""
    return module._on_before_batch_transfer(batch)


def skips_backward(trainer: pl.Trainer) -> bool:
    """Whether batches are run for the statistics of batch norms alone, as `StochasticWeightAveraging` does."""
    return bool(trainer.fit_loop.epoch_loop.automatic_optimization._skip_backward)


SKIPPED = object()
"""What a strategy's `training_step` returns in place of None, which Lightning refuses with several processes."""


class ClosureResult(_ClosureResult):
    """What a training step returned, or that it has skipped its batch."""

    @classmethod
    @override
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> _ClosureResult:
        output = None if training_step_output is SKIPPED else training_step_output
        return super().from_training_step_output(output, normalize)


def allow_skipping(trainer: pl.Trainer, patches: Patches) -> None:
    """Let a batch be skipped by a `training_step` that returns None, as with one process."""
    patches.set(trainer.fit_loop.epoch_loop.automatic_optimization, "output_result_cls", ClosureResult)


Handler = Callable[[int, FrameType | None], None]


def handle_signals(trainer: pl.Trainer, on_sigterm: Handler, on_requeue: Handler, patches: Patches) -> Handler:
    """Replace the handlers that Lightning is about to register, and its talk about SIGTERM after each batch.

    Returns:
        What Lightning does when SLURM asks to save and be requeued.
    """
    connector: Any = trainer._signal_connector
    save_and_requeue: Handler = connector._slurm_sigusr_handler_fn
    patches.set(connector, "_sigterm_notifier_fn", on_sigterm)
    patches.set(connector, "_slurm_sigusr_handler_fn", on_requeue)
    patches.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    return save_and_requeue


def after_batches(
    trainer: pl.Trainer,
    agree: Callable[[str], None],
    is_over: Callable[[], None],
    first_comes: Callable[[bool], None],
    evaluated: Callable[[bool, bool], None],
    evaluation_ends: Callable[[bool], None],
    patches: Patches,
) -> None:
    """Call what agrees with other ranks, where all of a pipeline are at the same place.

    Args:
        trainer: The Trainer.
        agree: Called after each training batch's hooks, after each validation, and after the hooks of each epoch of
            training; that is, before Lightning looks at `trainer.should_stop`, and where it saves for SLURM.
        is_over: Called when Lightning has done all that belongs to a training batch, or to an epoch.
        first_comes: Called before the first batch of an evaluation, of each loader, with whether each has batches.
        evaluated: Called after each such batch's hooks, with whether the loop expects more batches, and the same.
        evaluation_ends: Called when it has no more, of one of several loaders or at all, before what is done then, and
            where it never had any; with the same.
        patches: Closing them puts back what calls these.
    """
    connector: Any = trainer._logger_connector
    fit_loop = trainer.fit_loop
    validation = fit_loop.epoch_loop.val_loop
    places: list[tuple[Any, str, Callable[[], Any]]] = [
        (connector, "on_batch_end", lambda: agree("a batch") if trainer.training else None),
        (validation, "run", lambda: agree("validation")),
        (fit_loop.epoch_loop, "on_advance_end", is_over),
        (fit_loop, "on_advance_end", lambda: agree("an epoch of training")),
        (fit_loop, "on_advance_end", is_over),
    ]
    for loop in (validation, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        progress: Any = loop.batch_progress
        places.append((progress, "increment_ready", partial(_comes, loop, first_comes)))
        places.append((progress, "increment_completed", partial(_evaluated, loop, evaluated)))
        ending = "on_run_end" if loop is trainer.predict_loop else "_store_dataloader_outputs"  # reduces what is logged
        patches.set(loop, ending, _after(partial(_ends, loop, evaluation_ends), getattr(loop, ending)))
        patches.set(loop, "run", _and_then(loop.run, partial(_ran, loop, evaluation_ends)))
    for owner, name, then in places:
        patches.set(owner, name, _and_then(getattr(owner, name), then))


def validate_together(trainer: pl.Trainer, is_any: Callable[[bool], bool], patches: Patches) -> None:
    """Let ranks validate together where the time decides when: each has a clock of its own.

    Args:
        trainer: The Trainer.
        is_any: Answers on each rank whether any says yes.
        patches: Closing them puts back what decides.
    """
    loop = trainer.fit_loop.epoch_loop
    if not isinstance(getattr(trainer, "val_check_interval", None), (int, float)):  # a time is not kept there
        decide = loop._should_check_val_fx
        patches.set(loop, "_should_check_val_fx", lambda data_fetcher: is_any(decide(data_fetcher)))


def try_together(tell: Callable[[], object], patches: Patches) -> None:
    """Let ranks that look for the largest batch run out of memory together.

    Args:
        tell: Tells the others of it; a collective call of those that have run out of it, or come to something else.
        patches: Closing them puts back what makes a trial.
    """
    make_trial = batch_size_scaling._try_loop_run

    def call(*args: Any, **kwargs: Any) -> None:
        try:
            make_trial(*args, **kwargs)
        except OutOfMemoryElsewhereError:
            raise
        except RuntimeError as error:
            if is_oom_error(error):
                with suppress(OutOfMemoryElsewhereError):
                    tell()
            raise

    patches.set(batch_size_scaling, "_try_loop_run", call)


def _comes(loop: Any, first_comes: Callable[[bool], None]) -> None:
    if loop.batch_progress.current.ready == 1:
        first_comes(all(loop.max_batches))


def _evaluated(loop: Any, evaluated: Callable[[bool, bool], None]) -> None:
    evaluated(not loop.batch_progress.is_last_batch, all(loop.max_batches))


def _ends(loop: Any, evaluation_ends: Callable[[bool], None]) -> None:
    # a loader that cannot tell its length may turn out to have no batch
    evaluation_ends(all(loop.max_batches) and loop.batch_progress.current.ready > 0)


def _ran(loop: Any, evaluation_ends: Callable[[bool], None]) -> None:
    if loop.skip:  # it has done nothing, while others may
        evaluation_ends(False)


def _and_then(function: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        then()
        return result

    return call


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return call


class Restoring:
    """Keeps Lightning from loading weights before the strategy's setup, where it would, and loads them when called.

    Strategies that ask Lightning to load them after the setup get them after `on_fit_start`, and without the
    `weights_only` that the user gave.

    Args:
        trainer: The Trainer, before it has loaded them.

    Attributes:
        path: The checkpoint, once Lightning would have loaded it; None: there is none.
    """

    def __init__(self, trainer: pl.Trainer) -> None:
        self.path: Any = None
        self._arguments: tuple[Any, ...] = (None,)
        self._connector: Any = trainer._checkpoint_connector
        vars(self._connector)["_restore_modules_and_callbacks"] = self._note

    def _note(self, path: Any = None, *others: Any) -> None:
        self.path, self._arguments = path, (path, *others)

    def __call__(self) -> None:
        vars(self._connector).pop("_restore_modules_and_callbacks", None)
        self._connector._restore_modules_and_callbacks(*self._arguments)


def end_after_batch(trainer: pl.Trainer) -> None:
    """Let Lightning end the run when this batch is done, as it does after SIGTERM."""
    trainer._signal_connector.received_sigterm = True
