"""What an Accelerator must do otherwise on a pipeline: loaders, schedulers, clipping, gathering, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader  # type: ignore[import-untyped]
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.files import write_text_atomically
from lightning_pfo.loops.compat import add_loader, add_model, is_prepared, mark_prepared, schedulers_of
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.strategy.parallel import random_state
from lightning_pfo.strategy.parallel.compat import tree_map_only

_STATE_FILE = "lightning_pfo.json"


def adapt(accelerator: Any, pipeline: PipelinedModel) -> None:
    """Replace the methods of an accelerator that take every process for a replica with data of its own.

    Args:
        accelerator: The accelerator; its own methods are back when the pipeline is released.
        pipeline: Its model.
    """
    clip, get_state_dict, unwrap = accelerator.clip_grad_norm_, accelerator.get_state_dict, accelerator.unwrap_model
    prepare_scheduler, save_state, load_state = (
        accelerator.prepare_scheduler,
        accelerator.save_state,
        accelerator.load_state,
    )
    parameters = set(pipeline.parameters())

    def clip_grad_norm_(to_clip: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2) -> Any:
        to_clip = list(to_clip)
        if not parameters.intersection(to_clip):
            return clip(to_clip, max_norm, norm_type)
        if norm_type != 2:
            raise ConfigurationError(f"Gradients of a pipeline are clipped by their 2-norm; got norm_type={norm_type}.")
        accelerator.unscale_gradients()
        return pipeline.clip_grad_norm_(max_norm, to_clip)

    def prepare_same_data_loader(loader: Any, device_placement: bool | None = None, *_: Any, **__: Any) -> Any:
        if is_prepared(loader):
            return loader
        config = accelerator.dataloader_config
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=pipeline.num_replicas,  # all ranks of a pipeline read the same batches
            process_index=pipeline.replica,
            split_batches=config.split_batches,
            even_batches=config.even_batches,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            rng_types=["torch"],  # shuffling draws from it: every epoch starts from rank 0's
            dispatch_batches=False,
            use_seedable_sampler=config.use_seedable_sampler,
            data_seed=config.data_seed,
            non_blocking=config.non_blocking,
            use_stateful_dataloader=config.use_stateful_dataloader,
        )
        mark_prepared(prepared)
        add_loader(accelerator, prepared)
        return prepared

    def prepare_single_step_scheduler(scheduler: Any) -> Any:
        prepared = prepare_scheduler(scheduler)
        prepared.split_batches = True  # a batch does not grow with the number of processes
        return prepared

    def gather_over_replicas(data: Any, use_gather_object: bool = False) -> Any:
        if pipeline.num_replicas == 1:
            return data  # every rank has all of it
        ends = accelerator.gradient_state.end_of_dataloader and accelerator.gradient_state.remainder > 0
        size = accelerator.gradient_state.remainder if ends else None  # the last batches were filled up
        if use_gather_object:
            parts: list[Any] = [None] * pipeline.num_replicas
            dist.all_gather_object(parts, data, group=pipeline.replica_group)
            return [item for part in parts for item in part][:size]

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            tensors = [torch.empty_like(tensor) for _ in range(pipeline.num_replicas)]
            dist.all_gather(tensors, tensor.contiguous(), group=pipeline.replica_group)
            return torch.cat(tensors)[:size] if tensor.dim() else torch.stack(tensors)

        return tree_map_only(torch.Tensor, gather, data)

    def save_state_and_wait(*args: Any, **kwargs: Any) -> Any:
        location = save_state(*args, **kwargs)
        accelerator.wait_for_everyone()  # until rank 0 has written it
        return location

    def load_state_everywhere(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        # files of fewer processes say nothing about the others
        message = [accelerator.step]
        dist.broadcast_object_list(message, src=0)
        accelerator.step = message[0]
        random_state.synchronise()

    def save_progress(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        if accelerator.is_main_process:
            write_text_atomically(Path(folder) / _STATE_FILE, json.dumps({"iteration": pipeline.iteration}))

    def load_progress(models: list[nn.Module], folder: str) -> None:
        path = Path(folder) / _STATE_FILE
        if path.exists():  # a checkpoint of a plain loop has none
            pipeline.iteration = int(json.loads(path.read_text())["iteration"])

    replaced = {
        "clip_grad_norm_": clip_grad_norm_,
        "prepare_data_loader": prepare_same_data_loader,
        "prepare_scheduler": prepare_single_step_scheduler,
        "gather_for_metrics": gather_over_replicas,
        "get_state_dict": lambda model, unwrap=True: (
            pipeline.full_state_dict() if model is pipeline else get_state_dict(model, unwrap)
        ),
        "unwrap_model": lambda model, *args, **kwargs: (
            pipeline.module if model is pipeline else unwrap(model, *args, **kwargs)
        ),
        "save_state": save_state_and_wait,
        "load_state": load_state_everywhere,
    }
    patches = pipeline.patches
    for name, method in replaced.items():
        patches.set(accelerator, name, method)
    patches.callback(accelerator.register_save_state_pre_hook(save_progress).remove)
    patches.callback(accelerator.register_load_state_pre_hook(load_progress).remove)
    add_model(accelerator, pipeline, patches)
    for scheduler in schedulers_of(accelerator):
        patches.set(scheduler, "split_batches", True)
