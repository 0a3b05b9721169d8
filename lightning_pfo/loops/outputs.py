"""What the call of a model gives that returns its loss among other outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops.together import Together
from lightning_pfo.strategy.compat.tensors import tree_map_only
from lightning_pfo.strategy.engine.engine import PipelineEngine
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


class LossOutput(dict[str, Any]):
    """The loss, as an item and an attribute; in evaluation the other outputs too, which are fetched when asked for.

    Args:
        *args: As for a dict.
        names: The names of all outputs, in order; empty: there is the loss alone.
        fetch: Gives another output by its name, the same on every rank; a collective call of a pipeline's ranks.
        **kwargs: As for a dict.
    """

    def __init__(
        self, *args: Any, names: Sequence[str] = (), fetch: Callable[[str], Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._names = tuple(names)
        self._fetch = fetch

    def converted(self, convert: Callable[[Any], Any]) -> LossOutput:
        """The same with other outputs converted."""
        fetch = self._fetch
        return LossOutput(dict.items(self), names=self._names, fetch=fetch and (lambda name: convert(fetch(name))))

    @property
    def loss(self) -> torch.Tensor:
        """The loss."""
        loss: torch.Tensor = self["loss"]
        return loss

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in list(self)[key])
        return super().__getitem__(key)

    def __missing__(self, key: str | int) -> Any:
        if self._fetch is None:
            if key == 0:  # transformers' models have the loss in the first place
                return self["loss"]
            raise OutputError(_NOT_IN_TRAINING.format(key=key))
        if isinstance(key, int) and -len(self) <= key < len(self):
            return self[self._names[key]]
        if key not in self._names:
            raise OutputError(f"The model's outputs are {list(self._names)}; got a request for {key!r}.")
        return self._fetch(key)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # of those who copy it
            raise AttributeError(name)
        return self[name]

    def __contains__(self, key: object) -> bool:
        if self._fetch is None and isinstance(key, str) and not super().__contains__(key):
            raise OutputError(_NOT_IN_TRAINING.format(key=key))  # nobody knows, and a no would be believed
        return key in self._names or super().__contains__(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names) if self._names else super().__iter__()

    def __len__(self) -> int:
        return len(self._names) or super().__len__()

    def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
        """An output, or the default where there is none of that name."""
        return self[key] if key in self else default  # noqa: SIM401 - which is this method

    def to_tuple(self) -> tuple[Any, ...]:
        """All outputs, as of transformers' models."""
        if self._fetch is None:
            raise OutputError(_NOT_IN_TRAINING.format(key="to_tuple"))
        return tuple(self.values())

    keys, values, items = Mapping.keys, Mapping.values, Mapping.items  # type: ignore[assignment]  # all, not those held


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
        names = list(found) if has_loss else []
        told, names = self._losses.share(({"loss": found["loss"]} if has_loss else found, names))
        if torch.is_grad_enabled():
            told = tree_map_only(torch.Tensor, lambda loss: without_gradients(loss, _IN_EVALUATION), told)
        return LossOutput(told, names=names, fetch=partial(self._fetch, found)) if names else told

    def _fetch(self, found: Any, name: str) -> Any:
        self._together.meet(f"a look at outputs {name!r}")
        return self._others.share(found[name] if self._engine.is_last else None)
