"""Methods of a strategy that all ranks call together, also in a script outside runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.engine.forked import refuse_forked
from lightning_pfo.strategy.step.effects.within import within_step

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def together(
    method: Callable[Concatenate[Any, _Parameters], _Result],
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Let a collective method say why it cannot come to an end.

    Outside a run it raises a `RankDiedError` where another rank has ended (within one, the launcher does), and in a
    process that was forked from a rank a `ConfigurationError`.
    """

    @wraps(method)
    def call(self: Any, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        refuse_forked(f"trainer.strategy.{method.__name__.lstrip('_')}")
        watch = self.rank_watch
        if watch is None or watch.is_active:
            return method(self, *args, **kwargs)
        with watch.call():
            return method(self, *args, **kwargs)

    return call


def between_steps(
    method: Callable[Concatenate[Any, _Parameters], _Result],
) -> Callable[Concatenate[Any, _Parameters], _Result]:
    """Let a collective method raise a `ConfigurationError` within a step, where others would not come to it."""

    @wraps(method)
    def call(self: Any, /, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if within_step():
            raise ConfigurationError(
                f"trainer.strategy.{method.__name__.lstrip('_')} needs all ranks, and within a step each is at another "
                f"place. Call it in a hook, such as on_train_batch_end; trainer.save_checkpoint(...) may be called in "
                f"a step too, and saves when the batch is done."
            )
        return method(self, *args, **kwargs)

    return call
