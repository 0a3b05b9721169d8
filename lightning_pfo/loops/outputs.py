"""What the call of a model gives that returns its loss among other outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops.together import Together
from lightning_pfo.strategy.engine.engine import PipelineEngine
from lightning_pfo.strategy.parallel.compat import tree_map_only
from lightning_pfo.strategy.step.gradients import without_gradients
from lightning_pfo.strategy.step.values import ValueExchange

_NOT_IN_TRAINING = (
    "In training the call of a model on a pipeline gives the loss alone: outputs are computed one microbatch after the "
    "other, and all of them would be kept on the last stage. Asked for was {key!r}. "
    "model.predict(**batch) gives all outputs on every rank, and so does the call under model.eval()."
)


_IN_EVALUATION = (
    "Under model.eval() the call of a model on a pipeline evaluates, and its loss has no gradients. Call model.train() "
    "before, and eval() of those parts that are to be as in evaluation, such as model.module.dropout.eval()."
)


class OutputError(PfoError, AttributeError, LookupError):
    """Something is not among the outputs."""


class LossOutput(dict[str, torch.Tensor]):
    """The loss, as an item and an attribute; in evaluation the other outputs too, when they are asked for.

    Args:
        *args: As for a dict.
        fetch: Gives another output by its name or place, the same on every rank; a collective call of a pipeline's
            ranks. None: there is none.
        **kwargs: As for a dict.
    """

    def __init__(self, *args: Any, fetch: Callable[[str | int], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetch = fetch

    def converted(self, convert: Callable[[Any], Any]) -> LossOutput:
        """The same with other outputs converted."""
        fetch = self._fetch
        return LossOutput(self, fetch=None if fetch is None else lambda key: convert(fetch(key)))

    @property
    def loss(self) -> torch.Tensor:
        """The loss."""
        return self["loss"]

    def __missing__(self, key: str | int) -> Any:
        if key == 0:  # transformers' models have the loss in the first place
            return self["loss"]
        if self._fetch is None:
            raise OutputError(_NOT_IN_TRAINING.format(key=key))
        return self._fetch(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of those who copy it
            raise AttributeError(name)
        return self[name]


class EvaluationOutputs:
    """Gives all ranks what a module returns in evaluation: the loss at once, and the rest when they ask for it.

    Args:
        engine: The pipeline engine of this rank.
        together: Where ranks meet.
    """

    def __init__(self, engine: PipelineEngine, together: Together) -> None:
        self._engine = engine
        self._together = together
        hosts = engine.host_group()
        self._losses, self._others = (
            ValueExchange(engine.device, engine.group, hosts, engine.last_rank) for _ in range(2)
        )

    def tell(self, found: Any) -> Any:
        """Give all ranks what the last stage's rank has found; a collective call of the pipeline's ranks.

        Args:
            found: What the module has returned for the batch; None on other ranks.

        Returns:
            The same; of outputs with a loss a `LossOutput`.
        """
        has_loss = isinstance(found, Mapping) and "loss" in found
        told, has_loss = self._losses.share(({"loss": found["loss"]} if has_loss else found, has_loss))
        if torch.is_grad_enabled():
            told = tree_map_only(torch.Tensor, lambda loss: without_gradients(loss, _IN_EVALUATION), told)
        return LossOutput(told, fetch=partial(self._fetch, found)) if has_loss else told

    def _fetch(self, found: Any, key: str | int) -> Any:
        self._together.meet(f"a look at outputs {key!r}")
        value: Any = None
        if self._engine.is_last:
            by_place = list(found.values())
            if isinstance(key, int) and -len(by_place) <= key < len(by_place):
                value = by_place[key]
            elif key in found:
                value = found[key]
            else:
                value = OutputError(f"The model's outputs are {list(found)}; got a request for {key!r}.")
        value = self._others.share(value)
        if isinstance(value, OutputError):
            raise value
        return value
