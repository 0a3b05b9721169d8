"""All that the package uses of what Lightning collects of `self.log`; see `strategy.compat`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric

from lightning_pfo.strategy.compat.patches import Patches

SEEN_IN = "lightning 2.5 to 2.6"
PRIVATE = {
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultCollection.log": (
        "A layer that has kept `self.log` would log on the rank of its stage only, and what has no value in a trace."
    ),
    "lightning.pytorch.trainer.connectors.logger_connector.result._ResultMetric.to": (
        "Each log of a value would take 0.3 ms on each rank, in which Lightning copies what it knows of its name."
    ),
    "lightning.pytorch.Trainer._results": (
        "Replicas would reduce values of other names together, where their evaluation steps log others, or hang."
    ),
}

_OF_RESULTS = ("sync_dist_fn",)
_OF_NOTHING = {"max": -math.inf, "min": math.inf}
"""What counts nothing in a reduction; in others it is 0, of no samples."""


def logs_by(log: Callable[[str, Any, Mapping[str, Any]], bool], patches: Patches) -> None:
    """Let what is logged by a method of the module that somebody has kept go another way, where `log` takes it."""
    original = _ResultCollection.log

    def log_result(results: _ResultCollection, fx: str, name: str, value: Any, **kwargs: Any) -> None:
        if not log(name, value, {key: given for key, given in kwargs.items() if key not in _OF_RESULTS}):
            original(results, fx, name, value, **kwargs)

    patches.set(_ResultCollection, "log", log_result)


def keep_results_where_they_are(patches: Patches) -> None:
    """Let a result that is on its device not be moved there with each value that is logged; nearly all are."""
    original = _ResultMetric.to

    def to(result: _ResultMetric, *args: Any, **kwargs: Any) -> _ResultMetric:
        if result.is_tensor and not kwargs:
            tensors = (value for value in vars(result).values() if isinstance(value, torch.Tensor))
            if all(tensor.device == args[0] for tensor in tensors):
                return result
        return original(result, *args, **kwargs)

    patches.set(_ResultMetric, "to", to)


def log_what_any_logs(
    trainer: pl.Trainer, exchange: Callable[[Any], list[Any]], without_others: Callable[[], Any]
) -> None:
    """Have in the results of an evaluation what replicas have in theirs, in one order; a collective call of these.

    Lightning reduces results one after the other, as they come. What was not logged here counts nothing.

    Args:
        trainer: The Trainer, whose loop is about to reduce what was logged in its steps.
        exchange: Tells what each replica has, by rank.
        without_others: Makes a context in which logging reduces nothing.
    """
    results: Any = trainer._results
    mine = {} if results is None else {key: _arguments_of(one) for key, one in results.valid_items() if _is_shared(one)}
    everyone = exchange(mine)
    if all(list(each) == list(mine) for each in everyone):
        return
    found = {key: arguments for each in everyone for key, arguments in each.items()}
    for key, arguments in found.items():
        if key not in mine:
            metric, reduction = arguments["metric_attribute"], arguments["reduce_fx"]
            value: Any = torch.tensor(_OF_NOTHING.get(reduction, 0.0), device=trainer.strategy.root_device)
            if metric is not None:
                value = trainer.lightning_module.get_submodule(metric)
            with without_others():
                results.log(value=value, batch_size=0, sync_dist_fn=trainer.strategy.reduce, **arguments)
        results[key] = results.pop(key)


def _is_shared(result: Any) -> bool:
    """Whether replicas reduce it; metric objects do so themselves."""
    sync = result.meta.sync
    return not result.is_tensor or (sync.should and not sync.rank_zero_only)


def _arguments_of(result: Any) -> dict[str, Any]:
    meta = result.meta
    number = f".{meta.dataloader_idx}" if meta.add_dataloader_idx and meta.dataloader_idx is not None else ""
    names = "name prog_bar logger on_step on_epoch enable_graph add_dataloader_idx metric_attribute"
    return {name: getattr(meta, name) for name in names.split()} | {
        "fx": meta.fx.removesuffix(number),
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": meta.sync.should,
    }
