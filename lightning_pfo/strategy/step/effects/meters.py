"""Numbers of objects that count samples, such as average meters: they go on from microbatch to microbatch.

An object counts samples if one of its integers grows by the number of these, and none by one. Where microbatches have
one sample each, earlier batches tell, or a float beside. What it makes of its numbers may be anything
(`self.avg = self.sum / self.count`, a running variance), so it goes on as it does from batch to batch. A number that
each microbatch sets to the quotient of what two others have grown by, as `self.val` where `self.sum` grows by `val * n`
and `self.count` by `n`, is for the batch the quotient of all that they have grown by.
"""

from __future__ import annotations

import math
from collections.abc import Collection, MutableMapping
from itertools import pairwise
from typing import Any

from lightning_pfo.strategy.model.reach.places import Path
from lightning_pfo.strategy.step.effects.merge import Change, Changes

_CLOSE = 1e-4


class Meters:
    """The numbers of objects that count samples, while a batch goes on.

    Args:
        objects: Where there are objects.
        known: Which of them were found to count samples or not, to which more are added.
    """

    def __init__(self, objects: Collection[Path], known: MutableMapping[Path, bool]) -> None:
        self._objects = objects
        self._known = known
        self._runs: dict[Path, list[dict[Any, Any]]] = {}
        self._largest = 1

    def take(self, path: Path, found: dict[Any, Change], before: Any, size: int) -> dict[Any, Change]:
        """Keep the numbers of an object that counts samples.

        Args:
            path: Where it is.
            found: What a run has changed of it.
            before: What it had at the begin of the batch.
            size: How many samples the microbatch has.

        Returns:
            What is left, which does not go on.
        """
        if path not in self._objects:
            return found
        if path not in self._runs:
            counts = {key: value for key, (_, value) in found.items() if type(value) is type(before.get(key)) is int}
            growth = {value - before[key] for key, value in counts.items()}
            is_meter = size in growth and 1 not in growth
            if size == 1:  # nobody can tell, but where there is a float too, its mean is right either way
                is_meter = self._known.get(path, any(type(value) is float for _, value in found.values()))
            elif counts:
                self._known[path] = is_meter
            self._largest = max(size, self._largest)
            if size not in growth or not is_meter or size < self._largest:
                return found
        runs = self._runs.setdefault(path, [{k: value for k, value in before.items() if _is_number(value)}])
        going_on = {key: value for key, (kind, value) in found.items() if kind == "set" and _is_number(value)}
        runs.append(runs[-1] | going_on)
        return {key: change for key, change in found.items() if key not in going_on}

    def go_on(self, path: Path, attributes: MutableMapping[Any, Any]) -> None:
        """Give an object, which is as at the begin of the batch, the numbers that it has come to."""
        if path in self._runs:
            first, *_, last = self._runs[path]
            attributes.update({key: value for key, value in last.items() if first.get(key, attributes) is not value})

    def goes_on(self, path: Path) -> bool:
        """Whether an object is not as at the begin of the batch."""
        return path in self._runs

    def forget(self) -> None:
        """Let nothing go on."""
        self._runs = {}

    def changes(self) -> Changes:
        """What they have come to."""
        changes: Changes = {}
        for path, runs in self._runs.items():
            last = runs[-1] | _fresh_quotients(runs)
            changes |= {(*path, key): ("set", value) for key, value in last.items() if runs[0].get(key) is not value}
        return changes


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _number(value: Any) -> Any:
    return value if _is_number(value) else 0


def _fresh_quotients(runs: list[dict[Any, Any]]) -> dict[Any, float]:
    """Numbers that each run sets to the quotient of what two others have grown by, for all runs together."""
    steps = list(pairwise(runs))
    if len(steps) < 2:
        return {}
    grown = {key: [_number(after[key]) - _number(before.get(key)) for before, after in steps] for key in runs[-1]}
    counts = [key for key, each in grown.items() if all(type(one) is int and one > 0 for one in each)]
    found = {}
    for key, value in runs[-1].items():
        for total, each in grown.items():
            for count in counts:
                is_quotient = key not in (total, count) and all(
                    math.isclose(after[key] * number, one, rel_tol=_CLOSE, abs_tol=1e-12)
                    for (_, after), one, number in zip(steps, each, grown[count], strict=True)
                )
                if is_quotient and type(value) is float:
                    found[key] = sum(each) / sum(grown[count])
    return found
