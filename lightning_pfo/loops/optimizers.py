"""Optimizers of an Accelerate loop: in stages, saved whole; and their schedulers, at the pace of replicas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pfo.loops.compat import has_steps_left, mark_prepared
from lightning_pfo.loops.plain import PipelinedModel


class Replaced:
    """The parameters of a model before the split, and what stands in their places since.

    Those of layers that are elsewhere now are kept only as long as an optimizer has them.

    Args:
        pairs: A parameter from before, and the one in its place.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        self._after = WeakIdKeyDictionary({old: new for old, new in pairs if new is not old})  # type: ignore[no-untyped-call]

    def follow(self, optimizer: Any) -> None:
        """Let an optimizer that was made before the split hold what was made in it."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._after:
                    optimizer.state.pop(parameter, None)
            group["params"] = [self._after.get(p, p) for p in group["params"]]  # type: ignore[no-untyped-call]


def prepare_for_pipeline(prepared: Any, pipeline: PipelinedModel, replaced: Replaced) -> None:
    """Let an optimizer that Accelerate has prepared train a pipeline, and deal in whole state dicts if it does.

    Args:
        prepared: Accelerate's optimizer.
        pipeline: The model.
        replaced: Parameters that the split has replaced.
    """
    mark_prepared(prepared)  # a second `prepare` would wrap it again
    replaced.follow(prepared)
    inner = prepared.optimizer
    of_pipeline = {id(parameter) for parameter in pipeline.parameters()}
    if of_pipeline.isdisjoint(id(parameter) for group in inner.param_groups for parameter in group["params"]):
        return
    pipeline.patches.set(prepared, "state_dict", lambda: pipeline.full_optimizer_state(inner))
    pipeline.patches.set(prepared, "load_state_dict", lambda state: pipeline.load_optimizer_state(inner, state))


def keep_pace(scheduler: Any, pipeline: PipelinedModel) -> None:
    """Let a scheduler that Accelerate has prepared make a step for each replica, until the pipeline is released.

    Accelerate makes one for each process, as each reads a batch of its own; ranks of a pipeline read the same one.

    Args:
        scheduler: Accelerate's scheduler.
        pipeline: The model.
    """
    if scheduler.split_batches:  # replicas share a batch
        return
    one_step = scheduler.step

    def step(*args: Any, **kwargs: Any) -> None:
        if not scheduler.step_with_optimizer or not scheduler.gradient_state.sync_gradients:
            one_step(*args, **kwargs)
            return
        for _ in range(pipeline.num_replicas):
            if has_steps_left(scheduler.scheduler):
                one_step(*args, **kwargs)

    pipeline.patches.set(scheduler, "split_batches", True)  # one step, not one for each process
    pipeline.patches.set(scheduler, "step", step)
