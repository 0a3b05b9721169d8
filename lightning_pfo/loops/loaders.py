"""Loaders of an Accelerate loop: all ranks of a pipeline read the same batches, replicas their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from accelerate.data_loader import (  # type: ignore[import-untyped]
    BatchSamplerShard,
    DataLoaderShard,
    IterableDatasetShard,
    prepare_data_loader,
)
from torch.utils.data import IterableDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.loops.compat import add_loader, is_prepared, mark_prepared
from lightning_pfo.loops.plain import PipelinedModel
from lightning_pfo.strategy.step.batches.notices import warn_once


def prepare_same(loader: Any, accelerator: Any, pipeline: PipelinedModel, device_placement: bool | None) -> Any:
    """Prepare a loader as `accelerator.prepare` does, with the same batches for all ranks of a pipeline.

    Args:
        loader: A loader; one that was prepared before is returned as it is.
        accelerator: The accelerator.
        pipeline: Its model.
        device_placement: Whether batches are moved to the device; None: as the accelerator does.
    """
    if is_prepared(loader):
        return loader
    config = accelerator.dataloader_config
    dataset = getattr(loader, "dataset", None)
    if pipeline.num_replicas > 1 and isinstance(dataset, IterableDataset) and config.even_batches:
        warn_once(
            f"Replicas read {type(dataset).__name__} in turn, and the last batch is filled with its first samples, as "
            f"with dispatch_batches=False: gather_for_metrics knows no length by which to cut it, and metrics count "
            f"some samples twice. Evaluate by a dataset with an index, or one that ends after a multiple of "
            f"{pipeline.num_replicas} batches."
        )
    prepared = prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=pipeline.num_replicas,
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
    _meet_at_begin(prepared, pipeline)
    return prepared


def check_adoptable(loader: Any) -> None:
    """Check that a loader which was prepared before the pipeline can be changed to give all ranks the same batches.

    Raises:
        ConfigurationError: If Accelerate divides the batches of the loader in another way than by indices.
    """
    if not isinstance(loader, DataLoaderShard) or isinstance(loader.dataset, IterableDatasetShard):
        raise ConfigurationError(
            f"Loaders that went through accelerator.prepare before prepare_pipeline give every process other batches. "
            f"Those of datasets with an index are changed to give all ranks the same; got a {type(loader).__name__} "
            f"over a {type(loader.dataset).__name__}. Prepare it after prepare_pipeline."
        )


def adopt(loader: Any, pipeline: PipelinedModel) -> None:
    """Let a loader that was prepared before the pipeline give its ranks the same batches, until it is released."""
    for sampler in (loader.batch_sampler, loader.sampler):
        if isinstance(sampler, BatchSamplerShard):
            pipeline.patches.set(sampler, "num_processes", pipeline.num_replicas)
            pipeline.patches.set(sampler, "process_index", pipeline.replica)
            if pipeline.num_replicas == 1:  # nobody waits for a last batch of the same size
                pipeline.patches.set(sampler, "even_batches", False)
    _meet_at_begin(loader, pipeline)


def _meet_at_begin(loader: Any, pipeline: PipelinedModel) -> None:
    pipeline.patches.set(loader, "rng_types", _Meeting(loader.rng_types or (), pipeline.meet))


class _Meeting(list[Any]):
    """What random numbers are synchronised when an epoch begins: Accelerate goes through them; first, ranks meet."""

    def __init__(self, kinds: Iterable[Any], meet: Callable[[str], None]) -> None:
        super().__init__(kinds)
        self._meet = weakref.WeakMethod(meet)

    def __iter__(self) -> Iterator[Any]:
        meet = self._meet()
        if meet is not None:
            meet("begin of an epoch of a loader")
        return super().__iter__()
