"""What an Accelerator must do otherwise on a pipeline: optimizers, schedulers, clipping, gathering, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState  # type: ignore[import-untyped]
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.loops.compat import add_model, loaders_of, number_of_model, optimizers_of, schedulers_of
from lightning_pfo.loops.loaders import adopt, prepare_same
from lightning_pfo.loops.optimizers import Replaced, keep_pace, prepare_for_pipeline
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.loops.state import WRITES_ON_FIRST
from lightning_pfo.strategy.compat.tensors import tree_leaves, tree_map_only
from lightning_pfo.strategy.parallel import random_state

_STATE_FILE = "lightning_pfo{}.json"
_METHODS = (
    "backward",
    "clip_grad_norm_",
    "free_memory",
    "gather",
    "gather_for_metrics",
    "get_state_dict",
    "load_state",
    "prepare_data_loader",
    "prepare_optimizer",
    "prepare_scheduler",
    "reduce",
    "save_model",
    "save_state",
    "split_between_processes",
    "unwrap_model",
    "wait_for_everyone",
)


def adapt(accelerator: Any, pipeline: PipelinedModel, replaced: Replaced) -> None:
    """Replace the methods of an accelerator that take every process for a replica with data of its own.

    What it has prepared before is adapted too. All is undone when the pipeline is released.

    Args:
        accelerator: The accelerator.
        pipeline: Its model.
        replaced: The model's parameters before the split.
    """
    adapted = _AcceleratorOfPipeline(accelerator, pipeline, replaced)
    patches = pipeline.patches
    for name in _METHODS:
        patches.set(accelerator, name, getattr(adapted, name))
    _count_replicas(accelerator, pipeline)
    patches.callback(accelerator.register_save_state_pre_hook(adapted.save_progress).remove)
    patches.callback(accelerator.register_load_state_pre_hook(adapted.load_progress).remove)
    add_model(accelerator, pipeline, patches)
    for optimizer in optimizers_of(accelerator):
        prepare_for_pipeline(optimizer, pipeline, replaced)
    for scheduler in schedulers_of(accelerator):
        keep_pace(scheduler, pipeline)
    for loader in loaders_of(accelerator):
        adopt(loader, pipeline)


def _count_replicas(accelerator: Any, pipeline: PipelinedModel) -> None:
    """Let `num_processes` be the number of replicas, as the ranks of a pipeline read the same batches."""
    ordinary = type(accelerator)
    # a property is the class's
    of_pipeline = type(ordinary.__name__, (ordinary,), {"__reduce_ex__": _refuse_copies})

    def give_back() -> None:
        if type(accelerator) is of_pipeline:
            accelerator.__class__ = ordinary

    accelerator.__class__ = of_pipeline
    pipeline.patches.callback(give_back)
    number = pipeline.num_replicas
    pipeline.patches.set(of_pipeline, "num_processes", property(lambda self: number))
    pipeline.patches.set(of_pipeline, "is_last_process", property(lambda self: self.state.is_last_process))


def _refuse_copies(accelerator: Any, protocol: Any) -> Any:
    raise ConfigurationError(
        "An accelerator with a pipeline is one with its processes, and is neither pickled nor copied, nor part of "
        "what is. Give what needs one the accelerator itself, or make it there: Accelerator() has the same state "
        "in each process. accelerator.save_state(folder), on every rank, writes what training goes on from."
    )


class _AcceleratorOfPipeline:
    """The methods of an accelerator whose processes run one model together."""

    def __init__(self, accelerator: Any, pipeline: PipelinedModel, replaced: Replaced) -> None:
        self._accelerator = accelerator
        self._pipeline = pipeline
        self._replaced = replaced
        self._ordinary = {name: getattr(accelerator, name) for name in _METHODS}

    def prepare_data_loader(self, loader: Any, device_placement: bool | None = None, *_: Any, **__: Any) -> Any:
        return prepare_same(loader, self._accelerator, self._pipeline, device_placement)

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        prepared = self._ordinary["prepare_optimizer"](optimizer, device_placement=device_placement)
        prepare_for_pipeline(prepared, self._pipeline, self._replaced)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = self._ordinary["prepare_scheduler"](scheduler)
        keep_pace(prepared, self._pipeline)
        return prepared

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        if loss.is_meta:
            raise ConfigurationError(
                "The loss has a term that depends on parameters of other ranks, such as a sum over model.parameters(): "
                "here they are placeholders without values. For squares of weights use the optimizer's weight_decay; "
                "for others add the gradient of the term to p.grad of those parameters that are not on the meta device."
            )
        self._ordinary["backward"](loss, **kwargs)

    def clip_grad_norm_(self, to_clip: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> Any:
        to_clip = list(to_clip)
        if {id(parameter) for parameter in self._pipeline.parameters()}.isdisjoint(map(id, to_clip)):
            return self._ordinary["clip_grad_norm_"](to_clip, max_norm, norm_type)
        self._accelerator.unscale_gradients()
        return self._pipeline.clip_grad_norm_(max_norm, to_clip, norm_type)

    # ---- what processes tell each other ----

    def wait_for_everyone(self) -> None:
        self._pipeline.meet("accelerator.wait_for_everyone")
        self._ordinary["wait_for_everyone"]()

    def gather(self, tensor: Any) -> Any:
        """The tensors of all replicas."""
        self._pipeline.meet("accelerator.gather")
        self._check_same(tensor, "accelerator.gather")
        if self._pipeline.num_replicas == 1:
            return tensor
        return recursively_apply(partial(self._gather_over_replicas, size=None), tensor, error_on_other_type=True)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over replicas; a maximum does not change where ranks hold the same."""
        if isinstance(tensor, torch.Tensor) and self._is_of_model(tensor):  # as `LocalSGD` gives them
            return tensor if tensor.is_meta else self._reduce_over_replicas(tensor, reduction)
        self._pipeline.meet("accelerator.reduce")
        if reduction == "max" or tensor is self._accelerator.flag_tensor:  # of the trigger: any may set it
            return self._ordinary["reduce"](tensor, reduction, scale)
        self._check_same(tensor, "accelerator.reduce")
        return recursively_apply(self._reduce_over_replicas, tensor, reduction, error_on_other_type=True)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """A part of some inputs for each replica."""
        place = SimpleNamespace(
            num_processes=self._pipeline.num_replicas,
            process_index=self._pipeline.replica,
            device=self._accelerator.device,
        )
        split: AbstractContextManager[Any] = PartialState.split_between_processes(place, inputs, apply_padding)
        return split

    def _check_same(self, data: Any, what: str) -> None:
        others = self._pipeline.ranks_with_others(data)
        if others:
            raise ConfigurationError(
                f"{what} counts the ranks of a pipeline once, as they hold the same, but ranks {others} of this one "
                f"give other values than rank 0. For a value of each process (its memory, its time) call the function "
                f"of that name in accelerate.utils; for metrics that ranks round differently, "
                f"accelerator.gather_for_metrics."
            )

    def _is_of_model(self, tensor: torch.Tensor) -> bool:
        if tensor.is_meta:
            return True
        held = {parameter.data_ptr() for parameter in self._pipeline.parameters() if not parameter.is_meta}
        return tensor.numel() > 0 and tensor.data_ptr() in held

    def _reduce_over_replicas(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        reduced, group = tensor.clone(), self._pipeline.replica_group
        if group is not None:
            dist.all_reduce(reduced, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
            if reduction == "mean":
                reduced /= self._pipeline.num_replicas
        return reduced

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Every rank of a pipeline has all of it: gathered over replicas, and cut where Accelerate cuts it."""
        self._pipeline.meet("accelerator.gather_for_metrics")
        state = self._accelerator.gradient_state
        # the last batches were filled up, or something was repeated for as many samples as other batches have
        size = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(data)):
            found = self._gather_objects(data)
            return found[:size] if isinstance(found, Sequence) else found
        return tree_map_only(torch.Tensor, partial(self._gather_over_replicas, size=size), data)

    def _gather_objects(self, data: Any) -> Any:
        number = self._pipeline.num_replicas
        if number == 1:
            return data
        parts: list[Any] = [None] * number
        dist.all_gather_object(parts, data, group=self._pipeline.replica_group)
        return [item for part in parts for item in part]

    def _gather_over_replicas(self, tensor: torch.Tensor, size: int | None) -> torch.Tensor:
        number = self._pipeline.num_replicas
        if number == 1:
            return tensor[:size] if tensor.dim() else tensor
        tensors = [torch.empty_like(tensor) for _ in range(number)]
        dist.all_gather(tensors, tensor.contiguous(), group=self._pipeline.replica_group)
        return torch.cat(tensors)[:size] if tensor.dim() else torch.stack(tensors)

    # ---- the model and its state ----

    def unwrap_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if model is self._pipeline:
            return self._pipeline.module
        return self._ordinary["unwrap_model"](model, *args, **kwargs)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        if model is self._pipeline or model is self._pipeline.module:
            return self._pipeline.full_state_dict()
        return self._ordinary["get_state_dict"](model, unwrap)

    def save_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        if model is self._pipeline:
            self._pipeline.meet(f"accelerator.save_model {WRITES_ON_FIRST}")
        whole = self._pipeline.gather_module() if model is self._pipeline else model
        if whole is not None:  # on the first rank
            self._ordinary["save_model"](whole, *args, **kwargs)
        if model is self._pipeline:
            self._pipeline.meet("end of accelerator.save_model")

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        self._pipeline.meet("accelerator.save_state")
        location = self._ordinary["save_state"](*args, **kwargs)
        self._accelerator.wait_for_everyone()  # until rank 0 has written it
        return location

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        self._pipeline.meet("accelerator.load_state")
        self._ordinary["load_state"](*args, **kwargs)
        # files of fewer processes say nothing about the others
        message = [self._accelerator.step]
        dist.broadcast_object_list(message, src=0)
        self._accelerator.step = message[0]
        random_state.synchronise()

    def save_progress(self, models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if self._accelerator.is_main_process:
            progress = {"iteration": self._pipeline.iteration}
            write_text_atomically(self._progress_file(folder), json.dumps(progress))

    def load_progress(self, models: list[nn.Module], folder: str) -> None:
        path = self._progress_file(folder)
        if path.exists():  # a checkpoint of a plain loop has none
            self._pipeline.iteration = int(json.loads(path.read_text())["iteration"])

    def _progress_file(self, folder: str) -> Path:
        """Of further pipelines with a number, as Accelerate names files of further models."""
        number = number_of_model(self._accelerator, self._pipeline)
        return Path(folder) / _STATE_FILE.format(f"_{number}" if number else "")

    def free_memory(self, *objects: Any) -> Any:
        """As Accelerate's: it lets go of the model too."""
        ordinary = self._ordinary["free_memory"]
        self._pipeline.release()
        vars(self).clear()  # Accelerate collects garbage while this method is under way
        return ordinary(*objects)
