"""What Lightning asks a strategy about checkpoints."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.groups import Wanted
from lightning_pfo.strategy.state import full as whole
from lightning_pfo.strategy.state import sharded as sharded_checkpoint
from lightning_pfo.strategy.state import whole_module
from lightning_pfo.strategy.state.files import is_remote, load_file, save_file
from lightning_pfo.strategy.state.hyperparameters import whole_hyperparameters
from lightning_pfo.strategy.step.by_units.whole_parameters import whole_parameters
from lightning_pfo.strategy.step.values import share_error
from lightning_pfo.strategy.trainer.callbacks.weight_averaging import gather_averages
from lightning_pfo.strategy.trainer.compat import WEIGHTS_ONLY, move_optimizers
from lightning_pfo.strategy.trainer.processes import MeshStrategy
from lightning_pfo.strategy.trainer.together import between_steps, together

_log = logging.getLogger(__name__)
_OWN_STATE = "pfo_pipeline"
_AFTER_FAILURE_S = 60.0


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes a local checkpoint beside its place and renames it, so that a crash never costs the one before.

    Lightning's own writes a file in the temporary directory and moves it, which copies it over the earlier checkpoint
    where that is another file system. Remote paths (`s3://...`) are left to Lightning.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        if storage_options is not None or is_remote(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        save_file(checkpoint, Path(path))

    @override
    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
        if is_remote(path) or not Path(path).is_file():
            return super().load_checkpoint(path, map_location, **options)
        return load_file(Path(path), map_location, weights_only=WEIGHTS_ONLY if weights_only is None else weights_only)


class CheckpointStrategy(MeshStrategy):
    """Base of strategies that save a model whose parts lie on several ranks, as one file or as a folder of shards."""

    _save_distributed_checkpoint: bool | str = False
    _offloads_shards = False
    _seed = 0
    _patches: Patches
    _saving: Future[None] | None = None
    _to_be_removed: tuple[str | Path, ...] = ()
    _own_state: dict[str, Any] | None = None

    @property
    @abstractmethod
    def _last_rank(self) -> int:
        """The pipeline rank of the last stage, whose copy of what all ranks hold is saved."""

    @property
    @abstractmethod
    def _is_split(self) -> bool:
        """Whether the module is divided into stages."""

    @abstractmethod
    def _reseed(self, seed: int) -> None:
        """Derive the random numbers inside microbatches from `seed` from now on."""

    @override
    def make_checkpoint_io(self) -> CheckpointIO:
        return SafeCheckpointIO()

    @between_steps
    @together
    def gather_module_state(self, module: nn.Module | None = None) -> dict[str, Any]:
        """The whole state dict of a split module (the user's) on the first process, empty on others; collective."""
        return whole.gather_module_state(module or self._module(), self._last_rank, self.mesh.pipeline_group)

    @between_steps
    @together
    def gather_module(self) -> pl.LightningModule | None:
        """The whole module on the first process, None on others; a collective call of all processes.

        It is a copy in CPU memory without anything of the pipeline: to save it by its own methods, to export it, or to
        generate with it, in hooks or after `fit`. Where processes were forked or spawned for the fit, the one that goes
        on has the whole module, and gets that.

        Raises:
            ConfigurationError: On the first process, if the module has something that cannot be copied.
        """
        if not dist.is_initialized():
            return self._module()
        self.meet("gathering the module")
        module = whole_module.gather_module(self._module(), self._last_rank, self.mesh.pipeline_group, self._patches)
        return cast("pl.LightningModule | None", module)

    @contextmanager
    def whole_parameters(self, *modules: nn.Module, gradients: bool = False) -> Iterator[None]:
        """Let modules have the layers of all ranks while the context is open; a collective call of all processes.

        For hooks that go over parameters, as to let a teacher follow its student. What is written is kept.

        Args:
            *modules: Parts of the LightningModule, or itself; without any, all of it.
            gradients: Whether their parameters have the gradients of all ranks, too, to be read.

        Raises:
            ConfigurationError: On every process, if parameters are divided (`fully_shard`, tensor parallelism).
        """
        with ExitStack() as opened:
            self._whole_parameters(opened, modules, gradients)
            yield

    @between_steps
    @together
    def _whole_parameters(self, opened: ExitStack, modules: Sequence[nn.Module], gradients: bool) -> None:
        if self._is_split and dist.is_initialized():
            self.meet("whole_parameters")
            given = modules or (self._module(),)
            group = self.mesh.pipeline_group
            opened.enter_context(whole_parameters(given, self.root_device, group, gradients=gradients))

    @override
    @between_steps
    @together
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._is_split:  # before any run, or where its begin has failed, the module is whole
            return super().lightning_module_state_dict()
        self.meet("collecting the state of the module")
        if not self._save_distributed_checkpoint:
            return self.gather_module_state()
        return sharded_checkpoint.module_shard(self._module(), self._last_rank, self.mesh.pipeline_group)

    @override
    @between_steps
    @together
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not optimizer.state_dict():  # Lightning's, where `configure_optimizers` returns None
            return {}
        sharded = self._save_distributed_checkpoint
        collect = sharded_checkpoint.optimizer_shard if sharded else whole.gather_optimizer_state
        return collect(getattr(optimizer, "optimizer", optimizer), self.mesh.pipeline_group)

    @override
    @together
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._is_split:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        self.meet("saving a checkpoint")
        self.finish_saving()
        filepath = self.broadcast(filepath)  # names may hold the time, which differs
        own_state = {"seed": self._seed, "random_state": random_state.portable_state()}
        checkpoint = {**checkpoint, _OWN_STATE: own_state}  # hooks that have kept the other find in it what they had
        self._make_hyperparameters_whole(checkpoint)
        if not self._save_distributed_checkpoint:
            gather_averages(self._module().trainer, checkpoint, self.gather_module_state)
            error: Exception | None = None
            try:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            except Exception as found:  # the first rank alone writes
                error = found
            # so that a script that catches it goes on everywhere
            share_error(error, self.mesh.groups.hosts(None), "Saving a checkpoint")
        elif storage_options is not None:
            raise ConfigurationError(
                "Sharded checkpoints are written by torch.distributed.checkpoint, which takes no storage_options; got "
                f"{storage_options!r}. Leave them out, or use save_distributed_checkpoint=False."
            )
        else:
            beside, state = None, self._module().trainer.state
            fits = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
            if self._save_distributed_checkpoint == "async" and fits:
                everyone = Wanted(tuple(range(self.world_size)), "gloo", use="checkpoints")
                (beside,) = self.mesh.groups.together([everyone])
            saving = sharded_checkpoint.save(checkpoint, Path(filepath), beside)
            self._saving = saving if beside is not None else None

    def _make_hyperparameters_whole(self, checkpoint: dict[str, Any]) -> None:
        """Let modules that were saved as hyperparameters have the layers of all ranks, on the first one."""
        module, key = self._module(), pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY
        state = {} if self._save_distributed_checkpoint else checkpoint.get("state_dict", {})
        of_pipeline = self._last_rank, self.mesh.pipeline_group, self._patches
        make = whole_hyperparameters(module, checkpoint.get(key), state, *of_pipeline)
        if make is None:
            return
        error: Exception | None = None
        try:
            if self.is_global_zero:
                checkpoint[key] = make()
        except Exception as found:
            error = found
        share_error(error, self.mesh.groups.hosts(None), "Saving hyperparameters")

    def save_only_together(self, trainer: pl.Trainer, wait_s: float) -> None:
        """A run has failed: callbacks may save only if all ranks have; those in a step would be waited for in vain.

        Args:
            trainer: The Trainer.
            wait_s: How long others have to fail too.
        """
        save = trainer.save_checkpoint

        def save_if_all_come(*args: Any, **kwargs: Any) -> None:
            if self.rank_watch is None or self.rank_watch.have_all_failed(wait_s):
                save(*args, **kwargs)
            else:
                _log.warning(
                    "No checkpoint is saved at this end: all ranks save together, and others are in the middle of a "
                    "step, or gone. Those that were saved before are there."
                )

        self._patches.set(trainer, "save_checkpoint", save_if_all_come)

    @together
    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written beside training is in its place; a collective call.

        Raises:
            Exception: What has gone wrong; the checkpoints before are all there.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()
            self.barrier("a checkpoint is written")
        for filepath in self._to_be_removed:
            super().remove_checkpoint(filepath)
        self._to_be_removed = ()

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Let the checkpoint that is being written beside training be finished: it is the last one before a failure.

        Other ranks may be gone, so this one does not meet them, and does not wait for ever.
        """
        super().on_exception(exception)
        saving, self._saving = self._saving, None
        if saving is None:
            return
        try:
            saving.result(timeout=_AFTER_FAILURE_S)
        except Exception as error:  # whatever writing raises; what is told is the exception that ended training
            _log.warning("The checkpoint that was being written is not complete (%r). Those before it are.", error)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, but not before the one that takes its place is written."""
        if self._saving is None:
            super().remove_checkpoint(filepath)
        else:
            self._to_be_removed += (filepath,)

    @override
    @together
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self.finish_saving()
        path = self.broadcast(checkpoint_path)
        if sharded_checkpoint.is_sharded(Path(path)):
            trusted = WEIGHTS_ONLY if weights_only is None else weights_only
            checkpoint = sharded_checkpoint.load(Path(path), self._module(), self.optimizers, weights_only=trusted)
        else:
            options = {} if weights_only is None else {"weights_only": weights_only}
            checkpoint = self.checkpoint_io.load_checkpoint(path, **options)
        self._own_state = checkpoint.pop(_OWN_STATE, None)  # hooks are given what Lightning gives them
        return checkpoint

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        whole.load_module_state(self._module(), checkpoint["state_dict"], strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):  # as Lightning
            if state:
                whole.load_optimizer_state(optimizer, state)
        self._move_optimizers()
        if self._own_state is not None:  # a single device's checkpoint has none
            random_state.set_portable_state(self._own_state["random_state"])
            self._reseed(self._own_state["seed"])

    def _move_optimizers(self) -> None:
        """Bring the states of optimizers to the device, but those of parameters that are not there."""
        if not self._offloads_shards:
            move_optimizers(self.optimizers, self.root_device)

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module
