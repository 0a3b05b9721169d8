"""Methods of a strategy that all ranks call together, also in a script outside runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lightning_pfo.strategy.engine.forked import refuse_forked

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
