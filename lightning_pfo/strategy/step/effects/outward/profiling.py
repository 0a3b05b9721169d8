"""Actions that a step times with the Trainer's profiler: for each microbatch, on each rank that runs their line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.reach.of_trainer import trainer_of


class StepActions:
    """Times what a step does where it runs for real, not where it is traced or compared.

    A run that ends where another stage begins stops the actions that it has started.

    Args:
        profiler: The profiler.
        within_step: Whether stages run a step.
        patches: Gives the profiler back when it is closed.
    """

    def __init__(self, profiler: Any, within_step: Callable[[], bool], patches: Patches) -> None:
        self._start, self._stop = profiler.start, profiler.stop
        self._within_step = within_step
        self._started: list[str] | None = None
        patches.set(profiler, "start", self._start_action)
        patches.set(profiler, "stop", self._stop_action)

    @contextmanager
    def of_run(self) -> Iterator[None]:
        """A stage runs the step on a microbatch."""
        before, self._started = self._started, []
        try:
            yield
        finally:
            for name in reversed(self._started):
                self._stop(name)
            self._started = before

    def _start_action(self, action_name: str) -> None:
        if self._started is not None and self._within_step():
            self._start(action_name)
            self._started.append(action_name)
        elif not self._within_step():
            self._start(action_name)

    def _stop_action(self, action_name: str) -> None:
        if self._started is not None and self._within_step():
            self._stop(action_name)
            if action_name in self._started:
                self._started.remove(action_name)
        elif not self._within_step():
            self._stop(action_name)


def actions_in_steps(owner: Any, within_step: Callable[[], bool], patches: Patches) -> StepActions | None:
    """Let a step time actions; None where nobody asked for a profile.

    Args:
        owner: The user's module.
        within_step: Whether stages run a step.
        patches: Gives the profiler back when it is closed.
    """
    profiler = getattr(trainer_of(owner), "profiler", None)
    if profiler is None or type(profiler).__name__ == "PassThroughProfiler":
        return None
    return StepActions(profiler, within_step, patches)
