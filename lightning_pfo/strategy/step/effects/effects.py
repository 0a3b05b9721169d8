"""What one batch leaves behind on every rank: attributes of the module, and what it said to loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.model.untouched import Changed, Flags
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.calls import Call, make_calls, merged_calls, redirected, with_values
from lightning_pfo.strategy.step.effects.merge import Changes
from lightning_pfo.strategy.step.effects.within import step_under_way


class Effects:
    """Collects what the microbatches of a batch leave behind.

    Args:
        owner: The user's module, as it is at the begin of the batch.

    Attributes:
        dear: Changes that stay on the rank where the step was run to its end.
    """

    def __init__(self, owner: nn.Module) -> None:
        self._owner = owner
        self._attributes = Attributes(owner)
        self._flags = Flags(owner)
        self._switched: Changed = ({}, {})
        self._changes: list[Changes] = []
        self._calls: list[list[Call]] = []
        self.dear: Changes = {}

    @contextmanager
    def of(self, *, ends_here: bool, log: Callable[..., Any]) -> Iterator[None]:
        """Run a step on a stage and a microbatch; afterwards the module is as before.

        Args:
            ends_here: Whether the step is run to its end here, so that what it leaves behind counts.
            log: What `self.log` calls then.
        """
        calls: list[Call] = []

        def nothing(*args: Any, **kwargs: Any) -> None:
            """Stand in for calls where the step is not run to its end."""

        def note(call: Call) -> None:
            calls.append(with_values(call))

        has_ended = False
        self._attributes.enter()
        try:
            with (
                redirected(self._owner, log if ends_here else nothing, note if ends_here else nothing),
                step_under_way(ends_here=ends_here),
            ):
                yield
            has_ended = True
        finally:
            with following(None):
                switched = self._flags.take_changes()
                if ends_here and has_ended:
                    self._switched = switched
                    self._changes.append(self._attributes.take_changes())
                    self._calls.append(calls)
                else:
                    self._attributes.take_back()

    def leave_alone(self, buffers: Iterable[str]) -> None:
        """Take buffers of the module for none of these: stages change them on the way."""
        self._attributes.leave_alone(buffers)

    def repeat(self, number: int) -> None:
        """Let so many microbatches have left what the latest has."""
        self._changes, self._calls = self._changes[-1:] * number, self._calls[-1:] * number

    def discard(self) -> None:
        """Leave nothing behind."""
        self._attributes.take_back_objects()

    def outcome(self, sizes: Sequence[int], weights: Sequence[float], *, is_sent: bool) -> dict[str, Any]:
        """What the batch leaves behind, where the step was run to its end.

        Args:
            sizes: How many samples the microbatches have.
            weights: How much they count.
            is_sent: Whether others get it; then changes that are dear stay here.
        """
        changes = self._attributes.merged(self._changes, sizes, weights)
        if is_sent:
            self.dear = self._attributes.dear(changes)
        return {
            "changes": {path: change for path, change in changes.items() if path not in self.dear},
            "switched": self._switched,
            "calls": merged_calls(self._calls, sizes, weights),
        }

    def leave(self, outcome: dict[str, Any]) -> None:
        """Leave it behind on this rank."""
        self._attributes.apply({**outcome["changes"], **self.dear})
        self._flags.apply(outcome["switched"])
        make_calls(self._owner, outcome["calls"])
