"""What a step must not look at when it has noted what is to be done: gradients and weights are not there yet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.tensors import tree_leaves
from lightning_pfo.strategy.model.tracing.ends import OtherPathError
from lightning_pfo.strategy.model.tracing.functions import tells_no_values, whose_values_count
from lightning_pfo.strategy.model.tracing.stage_run import StageRun
from lightning_pfo.strategy.model.tracing.tracked import Tracked, current_run
from lightning_pfo.strategy.model.variables import users_line

_GRADIENT = torch.Tensor.grad.__get__  # type: ignore[union-attr]


class Afterwards(TorchFunctionMode):
    """Refuses what looks at gradients or weights after something is noted that will change them.

    Attributes:
        has_gradients: Whether a backward is noted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stepped: set[int] = set()
        self._run = current_run()
        self.has_gradients = False

    def step(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note that these parameters are changed when the batch is done."""
        self._stepped.update(map(id, parameters))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.has_gradients and func == _GRADIENT and isinstance(args[0], nn.Parameter):
            raise ConfigurationError(
                _too_early(
                    "gradients after manual_backward",
                    "are there when all microbatches have run backward",
                    "Clip them by self.clip_gradients(optimizer, ...), zero them by optimizer.zero_grad(), and look at "
                    "them in on_after_backward or on_before_optimizer_step",
                )
            )
        # layers, weights that are followed, and what is given values of these, run in another phase of the step
        if self._stepped and not tells_no_values(func) and not self._is_in_layer():
            leaves = tree_leaves((args, kwargs or {}))
            tracked = any(isinstance(leaf, Tracked) for leaf in leaves)
            changed = [leaf for leaf in whose_values_count(func, args, leaves) if id(leaf) in self._stepped]
            if changed and not tracked and not (self._run is not None and self._run.looks_again(changed)):
                raise OtherPathError(
                    _too_early(
                        "weights after optimizer.step()",
                        "change when all microbatches have run",
                        "Do what needs the new ones in on_train_batch_end or in the next batch (if batch_idx % 2), "
                        "and what needs the old ones before optimizer.step()",
                    )
                )
        return func(*args, **(kwargs or {}))

    def _is_in_layer(self) -> bool:
        run = current_run()  # a stage that computes all to the end of the step follows nothing more
        return run is not self._run and not (run is None and isinstance(self._run, StageRun))


def _too_early(what: str, when: str, way_out: str) -> str:
    return (
        f"On a pipeline training_step runs for each microbatch, and what it does to gradients and weights is done once "
        f"for the batch, so it does not look at {what}, which {when}; it does so here: {users_line()} {way_out}."
    )
