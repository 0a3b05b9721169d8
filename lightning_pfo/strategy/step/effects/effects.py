"""What one batch leaves behind on every rank: attributes of the module, and what it said to loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.modules import children_of
from lightning_pfo.strategy.model.reach.flags import Changed, Flags
from lightning_pfo.strategy.model.reach.places import NO_MODULES, Path
from lightning_pfo.strategy.model.tracing.tracked import following
from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.attributes import Attributes
from lightning_pfo.strategy.step.effects.merge import Changes
from lightning_pfo.strategy.step.effects.outward.calls import (
    Outlets,
    is_of_metric,
    make_calls,
    merged_calls,
    redirected,
    with_values,
)
from lightning_pfo.strategy.step.effects.outward.noted import Call, Note
from lightning_pfo.strategy.step.effects.outward.opaque import OpaqueLook
from lightning_pfo.strategy.step.effects.outward.opening import openings_told
from lightning_pfo.strategy.step.effects.rows import Rows
from lightning_pfo.strategy.step.effects.tensors import Earlier
from lightning_pfo.strategy.step.effects.within import step_under_way

_OF_METRICS = ("update", "compute", "reset")


class AddedMetricError(ConfigurationError):
    """A step has added a metric: it cannot be run in any way."""


class Effects:
    """Collects what the microbatches of a batch leave behind.

    Args:
        owner: The user's module, as it is at the begin of the batch.
        modules: Other modules whose attributes count, by name.
        earlier: What is known from earlier batches; None: it is no batch that counts.
        meters: Then what is known of objects that count samples, see `Earlier`.

    Attributes:
        dear: Changes that stay on the rank where the step was run to its end.
        flags: How the module was switched at the begin of the batch.
        outlets: What a step says something through.
        told: What metrics are told of the batch.
    """

    def __init__(
        self,
        owner: nn.Module,
        modules: Mapping[str, nn.Module] = NO_MODULES,
        earlier: Earlier | None = None,
        meters: MutableMapping[Path, bool] | None = None,
    ) -> None:
        self._owner = owner
        large, meters = (None, meters) if earlier is None else (earlier.large, earlier.meters)
        self._attributes = Attributes(owner, modules, large, meters)
        self.looks = earlier is None or earlier.number > 0
        self._counts = earlier is not None
        self._opaque: OpaqueLook | None = None
        if earlier is not None and earlier.number and self._attributes.opaque:
            self._opaque = OpaqueLook(self._attributes.opaque, is_first=earlier.number == 1)
        self.outlets = Outlets(owner)
        self.flags = Flags(owner)
        self._containers = [*map(children_of, self.flags.modules)]
        self._num_held = sum(map(len, self._containers))
        self._switched: Changed = ({}, {})
        self._switches = False
        self.changes: list[Changes] = []
        self._calls: list[list[Call]] = []
        self.dear: Changes = {}
        self.told: list[Call] = []
        self._here: list[Call] = []
        self._is_alone = False

    def of(
        self, *, ends_here: bool, log: Callable[..., Any], index: int = 0, size: int = 1
    ) -> AbstractContextManager[None]:
        """Run a step on a stage and a microbatch; afterwards the module is as before.

        Args:
            ends_here: Whether the step is run to its end here, so that what it leaves behind counts.
            log: What `self.log` calls then.
            index: Which microbatch it is.
            size: How many samples that has.
        """
        return _Run(self, ends_here, log, index, size)

    def begin(self, index: int, note: Note) -> None:
        """A run of the step begins; `note` takes its calls."""
        self.flags.begin_run()
        self._attributes.generators.enter(index)
        self._attributes.enter()
        self._attributes.streams.enter(note)

    def openings_told(self, *, ends_here: bool) -> AbstractContextManager[None]:
        """While a run of the first batches goes on: name files that it opens to write."""
        return openings_told(counts=ends_here and self._counts)

    def end(self, calls: list[Call] | None, index: int, size: int) -> None:
        """A run is over; if it has run to the step's end, it has made these calls."""
        if sum(map(len, self._containers)) > self._num_held:
            self._refuse_metrics()
        with following(None):
            self._attributes.streams.leave(has_ended=calls is not None)  # what was written becomes one of the calls
        if self._opaque is not None:
            self._opaque.after_run()
        self._attributes.generators.leave(has_ended=calls is not None)
        with following(None):
            looks = index == 0 or self._switches  # dear, and a step does so for all microbatches, or for none
            switched = self.flags.end_run(looks=looks)
            if looks:
                self._switches = self._switches or any(switched) or self.flags.has_thawed
                self._switched = self._switched if calls is None else switched
            if calls is None:
                self._attributes.take_back()
            else:
                self.changes.append(self._attributes.take_changes(size))
                self._calls.append(calls)

    def _refuse_metrics(self) -> None:
        """Refuse metrics that a run of the step has added: each would have a microbatch's samples only."""
        known = set(map(id, self.flags.modules))
        for name, module in self._owner.named_modules():
            if id(module) not in known and all(callable(getattr(module, each, None)) for each in _OF_METRICS):
                raise AddedMetricError(
                    f"A step runs for each microbatch of a batch, and on every rank of a pipeline, so it adds no "
                    f"metrics; this one has added {name!r}. Add it in a hook, such as setup, on_train_epoch_start or "
                    f"on_validation_epoch_start."
                )

    def check_switched(self) -> None:
        """Check that no microbatch but the first has switched modules or parameters; else they are switched back.

        Raises:
            ConfigurationError: If one has, so that those after it were run otherwise than those before.
        """
        self.flags.freeze()
        if any(self.flags.take_changes()):
            raise ConfigurationError(
                "A step that switches modules (train, eval, requires_grad_) does so for each microbatch of a batch; "
                "here the first was run without. Decide by what all of them have in common, such as batch_idx."
            )

    def modules(self) -> list[nn.Module]:
        """The modules that the step reaches: those of the model, and others in containers, objects and variables."""
        return [*self.flags.modules, *self._attributes.modules]

    def leave_alone(self, buffers: Iterable[str]) -> None:
        """Take buffers of the module for none of these: stages change them on the way."""
        self._attributes.leave_alone(buffers)

    def repeat(self, number: int) -> None:
        """Let so many microbatches have left what the latest has."""
        self.changes, self._calls = self.changes[-1:] * number, self._calls[-1:] * number

    def discard(self) -> None:
        """Leave nothing behind."""
        self._attributes.discard()

    def value_at(self, path: Path) -> Any:
        """What was somewhere at the begin of the batch."""
        return self._attributes.value_at(path)

    def growth(self, index: int) -> dict[str, Any]:
        """What a microbatch has changed, to be compared with a trace of it; see `rules`."""
        return self.growth_in(self.changes[index])

    def growth_in(self, changes: Changes) -> dict[str, Any]:
        """The same of other changes."""
        return self._attributes.growth(changes)

    def calls(self, index: int) -> list[Call]:
        """The calls of a microbatch."""
        return self._calls[index]

    def outcome(
        self, sizes: Sequence[int], weights: Sequence[float], rules: Rules | None = None, *, is_sent: bool
    ) -> dict[str, Any]:
        """What the batch leaves behind, where the step was run to its end.

        Args:
            sizes: How many samples the microbatches have.
            weights: How much they count.
            rules: What is known of values at the same place.
            is_sent: Whether others get it; then changes that are dear stay here, and what metrics are told.
        """
        changes = self._attributes.merged(self.changes, sizes, weights, rules)
        calls = merged_calls(self._calls, sizes, weights, rules)
        self._is_alone = len(sizes) == 1 and not is_sent
        self.told = [call for call in calls if is_of_metric(call)]
        dear = self._attributes.dear(changes) if is_sent else {}
        if is_sent:
            self.dear = dear
            self._here = self.told
            calls = [call for call in calls if not is_of_metric(call)]
        return {
            "changes": {path: change for path, change in changes.items() if path not in dear},
            "rows": {path: where for path, where in self._attributes.rows.items() if path not in dear},
            "switched": self._switched,
            "drawn": self._attributes.generators.drawn(),
            "taken": self._attributes.streams.taken(),
            "calls": calls,
            "told": [(told.place, method) for ((_, told), (_, method), *_), *_ in self._here],
        }

    def draw_others(self, number: int) -> None:
        """Let generators of the user's begin with other numbers; 0: with those that they have."""
        self._attributes.generators.draw_others(number)

    def change(self, changes: Changes) -> None:
        """Make changes on this rank, and nothing else of an outcome."""
        self._attributes.apply(changes)

    def leave(self, outcome: dict[str, Any], *, is_first: bool) -> list[Rows]:
        """Leave it behind on this rank; the first of a pipeline writes into files.

        Returns:
            What is left in rows.
        """
        if self._opaque is not None:
            self._opaque.end()
        self._attributes.apply({**outcome["changes"], **self.dear})
        self.flags.apply(outcome["switched"])
        self._attributes.generators.apply(outcome["drawn"], as_drawn=self._is_alone)
        self._attributes.streams.go_on(outcome["taken"])
        outlets = self._attributes.streams.outlets(is_first=is_first) if outcome["calls"] else {}
        make_calls(self._owner, [*self._here, *outcome["calls"]], outlets, is_first=is_first)
        return self._attributes.rows_at(outcome["rows"])


class _Run(AbstractContextManager[None]):
    """A run of the step on a stage and a microbatch; a generator would take several times as long."""

    def __init__(self, effects: Effects, ends_here: bool, log: Callable[..., Any], index: int, size: int) -> None:
        self._effects = effects
        self._index, self._size = index, size
        self._calls: list[Call] | None = [] if ends_here else None
        self._note: Note = _nothing if self._calls is None else _taking(self._calls)
        self._redirected = redirected(effects.outlets, log if ends_here else _nothing, self._note)
        self._under_way = step_under_way(ends_here=ends_here)
        self._opening = effects.openings_told(ends_here=ends_here) if effects.looks else nullcontext()

    def __enter__(self) -> None:
        self._effects.begin(self._index, self._note)
        self._redirected.__enter__()
        self._under_way.__enter__()
        self._opening.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._opening.__exit__(None, None, None)
        self._under_way.__exit__()
        self._redirected.__exit__()
        self._effects.end(self._calls if kind is None else None, self._index, self._size)


def _taking(calls: list[Call]) -> Note:
    """What adds to a list; a method of what holds it would keep that alive until garbage is collected."""

    def take(call: Call) -> int:
        calls.append(with_values(call))
        return len(calls) - 1

    return take


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for calls where the step is not run to its end."""
