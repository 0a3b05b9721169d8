"""What one run of a step leaves, in one piece, so that runs can be compared: see `rules`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_pfo.strategy.step.batches.rules import Rules
from lightning_pfo.strategy.step.effects.merge import GROWN, SET
from lightning_pfo.strategy.step.effects.outward.calls import arguments_of, place_of
from lightning_pfo.strategy.step.effects.outward.noted import Call


@dataclass
class Left:
    """What a step leaves.

    Attributes:
        output: What it returns.
        growth: By how much it changes what, see `Attributes.growth`.
        calls: Calls of others.
        logged: What it logs: names, values (None: no number), and the `batch_size` that is given with these.
    """

    output: Any = None
    growth: dict[str, Any] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    logged: list[tuple[str, Any, int | None]] = field(default_factory=list)

    def logged_by_place(self) -> dict[str, Any]:
        """What it logs, by where that is."""
        found: dict[str, Any] = {}
        seen: dict[str, int] = {}
        for name, value, _ in self.logged:
            if value is not None:
                found[place_of_log(name, seen.get(name, 0))] = value
            seen[name] = seen.get(name, 0) + 1
        return found

    def sizes_by_place(self) -> dict[str, int]:
        """What it says by `batch_size`, by where that is."""
        found: dict[str, int] = {}
        seen: dict[str, int] = {}
        for name, _, size in self.logged:
            if size is not None:
                found[place_of_size(name, seen.get(name, 0))] = size
            seen[name] = seen.get(name, 0) + 1
        return found


def learn(rules: Rules, first: Left, second: Left, small: Left, large: Left, other: Left | None) -> None:
    """Compare what microbatches leave with traces of them, which know what follows from the batch.

    Args:
        rules: What is known, to which more is added.
        first: What the first microbatch has left.
        second: What the second has.
        small: What a trace of the first leaves.
        large: What a trace of both as one batch leaves.
        other: What a trace of the second leaves, with other numbers for what layers compute; None: it did not run.
    """
    runs = [first, second, small, large, *([] if other is None else [other])]
    rules.learn("output", *(beside_loss(run.output) for run in runs))
    if len({tuple(path for path, _, _ in run.calls) for run in runs}) == 1:
        for index, alike in enumerate(zip(*(run.calls for run in runs), strict=True)):
            rules.learn(place_of(index, alike[0]), *map(arguments_of, alike))
    of_all = [run.growth | run.logged_by_place() | run.sizes_by_place() for run in runs]
    counted = {place: value for place, value in first.growth.items() if type(value) in (int, float)}
    for found in of_all[2:]:  # it may have counted nothing
        found |= _unchanged(counted, found)
        found |= _unchanged(small.growth, found)
    for place in of_all[0]:
        if all(place in each for each in of_all):
            rules.learn(place, *(each[place] for each in of_all))


def place_of_log(name: str, nth: int) -> str:
    """Where a value is that the step logs under a name that it has used so often before."""
    return f"the value that is logged as {name!r}" + f", number {nth}" * (nth > 0)


def place_of_size(name: str, nth: int) -> str:
    """Where the `batch_size` is that a value is logged with."""
    return f"the batch_size of {place_of_log(name, nth)}"


def _unchanged(growth: dict[str, Any], of_run: dict[str, Any]) -> dict[str, Any]:
    """What there is of numbers that a run sets to what they were, and another one does not."""
    places = [place.removesuffix(GROWN) for place in growth if place.endswith(GROWN)]
    places = [place for place in places if place + SET not in of_run]
    before = {place: growth[place + SET] - growth[place + GROWN] for place in places}
    return {place + SET: value for place, value in before.items()} | {
        place + GROWN: value - value for place, value in before.items()
    }


def beside_loss(output: Any) -> Any:
    """What a step returns without its loss, which has a rule of its own."""
    if isinstance(output, Mapping) and "loss" in output:
        return {key: value for key, value in output.items() if key != "loss"}
    return output
