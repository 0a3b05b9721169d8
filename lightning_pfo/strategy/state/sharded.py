"""Sharded checkpoints: a folder into which every rank writes what it holds, with torch.distributed.checkpoint.

The folder is that of Lightning's `FSDPStrategy`: weights under `model`, optimizers under `optimizer_0`, ..., and all
the rest in `meta.pt`. So Lightning's consolidate command turns it into the very `.ckpt` that a single device writes::

    python -m lightning.pytorch.utilities.consolidate_checkpoint FOLDER

Optimizer state is kept by parameter id, which is that of a single device; hence any number of stages can load it.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import async_save as save_shards_beside
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import move_into_place, temporary_sibling
from lightning_pfo.strategy.compat.processes import LAYOUT_READER, load_alone
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.parallel.groups import global_rank
from lightning_pfo.strategy.state.alike import changed_in
from lightning_pfo.strategy.state.files import is_remote, save_file
from lightning_pfo.strategy.state.full import (
    local_module_state,
    local_optimizer_state,
    nest_optimizer_state,
    owned,
)

_META = "meta.pt"
_OTHERS = "pfo_pipeline_not_tensors"  # what is no tensor is kept here too, where weights_only governs how it is read


def is_sharded(path: Path) -> bool:
    """Whether `path` is a folder that `save` wrote."""
    return path.is_dir() and (path / _META).is_file()


def module_shard(module: nn.Module, last_rank: int, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What this rank contributes to the module's state dict; a collective call. See `checkpoint.owned`."""
    local = local_module_state(module)
    return _contributed(owned(local, last_rank, group, changed_in(module, local)), group)


def optimizer_shard(optimizer: Optimizer, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What this rank contributes to the optimizer's state dict; a collective call."""
    shard: dict[str, Any] = {
        "state": nest_optimizer_state(_contributed(owned(local_optimizer_state(optimizer), 0, group), group))
    }
    if dist.get_rank() == 0:
        # torch makes names of the ids in `state`; where they differ from those in the groups, state is not restored
        groups = optimizer.state_dict()["param_groups"]
        shard["param_groups"] = [{**group, "params": [str(index) for index in group["params"]]} for group in groups]
    return shard


def save(checkpoint: dict[str, Any], path: Path, beside: dist.ProcessGroup | None = None) -> Future[None]:
    """Write a checkpoint whose `state_dict` and `optimizer_states` are shards; a collective call of all ranks.

    All is written to a folder beside `path` and then put in its place, so a crash never costs the checkpoint before.

    Args:
        checkpoint: The checkpoint, in Lightning's form.
        path: The folder.
        beside: All processes, in a gloo group for nothing else: tensors are copied, and written while training goes on.
            None: all is written when this returns.

    Returns:
        Done when this rank has written all, and the first rank when the folder is in its place; has the error, if any.

    Raises:
        ConfigurationError: If `path` is not on a file system that all ranks share by name.
    """
    if is_remote(path):
        raise ConfigurationError(
            f"A sharded checkpoint is written to a folder that all ranks reach by its name; got {str(path)!r}. Save to "
            "a shared file system, or use save_distributed_checkpoint=False."
        )
    rest = dict(checkpoint)
    shards: dict[str, Any] = {"model": rest.pop("state_dict")}
    shards |= {f"optimizer_{index}": shard for index, shard in enumerate(rest.pop("optimizer_states", []))}
    temporary = temporary_sibling(path)
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # of a save that was interrupted
        temporary.mkdir(parents=True)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, _without_tensors(shards))  # also lets no rank write before the folder is there
    if dist.get_rank() == 0:
        save_file({**rest, _OTHERS: others}, temporary / _META)
    writer, done = FileSystemWriter(temporary, sync_files=True), Future[None]()

    def finish(written: Future[Any]) -> None:
        try:
            written.result()
            if dist.get_rank() == 0:
                move_into_place(temporary, path.absolute())
        except BaseException as error:
            if dist.get_rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)  # on a full disk somebody needs the space
            done.set_exception(_first_of(error))
        else:
            done.set_result(None)

    if beside is None:
        written = Future[Any]()
        try:
            written.set_result(save_shards(shards, storage_writer=writer))
        except (Exception, CheckpointException) as error:  # which is none
            written.set_exception(error)
    else:
        copied = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), shards)  # of what training changes
        started: Any = save_shards_beside(copied, storage_writer=writer, process_group=beside)
        written = getattr(started, "upload_completion", started)
    written.add_done_callback(finish)
    if beside is None:
        done.result()
    return done


def _first_of(error: BaseException) -> BaseException:
    """What went wrong on the first rank on which something did; torch's error has it in a traceback as a text."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next((failed for failed, _ in failures.values()), error)


def load(
    path: Path, module: nn.Module, optimizers: Sequence[Optimizer], *, weights_only: bool | None
) -> dict[str, Any]:
    """Read what this rank needs; nothing is communicated.

    Returns:
        The checkpoint in Lightning's form, with meta tensors in place of the weights of other ranks.

    Raises:
        ConfigurationError: If `weights_only` is not False and the folder's index holds more than tensors' places.
    """
    checkpoint: dict[str, Any] = torch.load(path / _META, map_location="cpu", weights_only=weights_only)
    others = checkpoint.pop(_OTHERS, [])
    reader = _Reader(path, trusted=weights_only is False)
    stored = {
        key: entry
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    wanted: dict[str, torch.Tensor] = {}
    checkpoint["state_dict"] = _model_targets(stored, local_module_state(module), wanted)
    states = [_optimizer_targets(stored, f"optimizer_{index}", opt, wanted) for index, opt in enumerate(optimizers)]
    if wanted:
        load_alone(wanted, reader)
    for part in others:
        checkpoint["state_dict"] |= part.get("model", {})
    checkpoint["optimizer_states"] = [_complete(states[index], others, index) for index in range(len(states))]
    return checkpoint


def _contributed(values: dict[Any, Any], group: dist.ProcessGroup | None) -> dict[Any, Any]:
    # replicas hold the same, of which the first one's is taken; of a sharded tensor every replica holds another part
    if global_rank(group, 0) == 0:
        return values
    return {key: value for key, value in values.items() if isinstance(value, DTensor)}


def _without_tensors(node: Any) -> Any:
    if isinstance(node, Mapping):
        kept = {key: _without_tensors(value) for key, value in node.items() if not isinstance(value, torch.Tensor)}
        return {key: value for key, value in kept.items() if value != {}}
    return node


def _model_targets(
    stored: Mapping[str, TensorStorageMetadata], local: Mapping[str, Any], wanted: dict[str, torch.Tensor]
) -> dict[str, Any]:
    prefix = "model."
    targets = {}
    for name, entry in stored.items():
        if name.startswith(prefix):
            key = name.removeprefix(prefix)
            if key in local:
                wanted[name] = _empty(entry, local[key])
            targets[key] = wanted.get(name, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta"))
    return targets


def _optimizer_targets(
    stored: Mapping[str, TensorStorageMetadata], prefix: str, optimizer: Optimizer, wanted: dict[str, torch.Tensor]
) -> dict[tuple[str, str], Any]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    targets: dict[tuple[str, str], Any] = {}
    for name, entry in stored.items():
        if name.startswith(f"{prefix}.state."):
            index, key = name.removeprefix(f"{prefix}.state.").split(".", 1)
            if int(index) < len(parameters) and not parameters[int(index)].is_meta:
                wanted[name] = targets[index, key] = _empty(entry, parameters[int(index)])
    return targets


def _complete(values: dict[tuple[str, str], Any], others: list[dict[str, Any]], index: int) -> dict[str, Any]:
    groups: list[Any] = []
    for part in others:
        optimizer = part.get(f"optimizer_{index}", {})
        groups = optimizer.get("param_groups", groups)
        for parameter, found in optimizer.get("state", {}).items():
            values |= {(str(parameter), name): value for name, value in found.items()}
    return {"state": nest_optimizer_state(values), "param_groups": groups}


def _empty(entry: TensorStorageMetadata, like: torch.Tensor) -> torch.Tensor:
    """Room for a stored tensor, sharded like `like` if that has its shape."""
    if isinstance(like, DTensor) and entry.size == like.shape:
        return torch.empty_like(like, dtype=entry.properties.dtype)
    return torch.empty(entry.size, dtype=entry.properties.dtype)


class _Reader(FileSystemReader):
    """Reads the folder's index without running code from it, unless it is `trusted`; torch's own unpickles anything."""

    def __init__(self, path: Path, *, trusted: bool) -> None:
        super().__init__(path)
        self._trusted = trusted

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._trusted:
            return super().read_metadata(*args, **kwargs)
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _IndexUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _IndexUnpickler(pickle.Unpickler):
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        if module in self._MODULES or module == "torch" or module.split(".")[0] == "pathlib":
            found = super().find_class(module, name)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
            if isinstance(found, type) and (is_dataclass(found) or issubclass(found, (Enum, PurePath))):
                return found
        if (module, name) == LAYOUT_READER:
            return super().find_class(module, name)
        raise ConfigurationError(
            f"With weights_only=True a checkpoint's index names tensors only; this one uses {module}.{name}. Pass "
            "weights_only=False if you trust where it comes from."
        )
