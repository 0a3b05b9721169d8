r"""Pareto filter and lower convex hull of the options of one kind of instruction.

An option is a (time, cost, knob) triple: run at this knob (a clock in MHz), the instruction takes this time and costs
this much. Only Pareto-optimal options can appear in an optimal plan; only those on the lower convex hull appear in the
relaxation that mixes two of them::

    cost |x                      x  Pareto-optimal and on the hull
         | \  o                  o  Pareto-optimal, above the hull: useful only for rounding
         |  x.     .             .  dominated: something is at least as fast and at least as cheap
         |    ` x ___ x
         +--------------- time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers


@dataclass(frozen=True, eq=False)
class OptionSet:
    """The Pareto-optimal options of one kind of instruction, from fast and dear to slow and cheap.

    Compared and hashed by identity: instructions of one kind share one object.

    Attributes:
        times: Strictly increasing times in seconds.
        costs: Strictly decreasing costs in joules (effective energy; may be negative).
        knobs: The setting of each option, e.g. its clock in MHz.
        hull: Ascending indices of the options on the lower convex hull; the first and the last option are on it.
    """

    times: tuple[float, ...]
    costs: tuple[float, ...]
    knobs: tuple[int, ...]
    hull: tuple[int, ...]

    @cached_property
    def hull_line(self) -> tuple[Floats, Floats, Floats]:
        """Times and costs of the corners, fast to slow, and the slope in J/s of each edge, rising towards zero."""
        times, costs = np.array(self.hull_points).T
        with np.errstate(over="ignore"):  # a step is infinitely steep
            return times, costs, np.diff(costs) / np.diff(times)

    @property
    def hull_points(self) -> tuple[tuple[float, float], ...]:
        """The (time, cost) corners of the hull, fast to slow."""
        return tuple((self.times[k], self.costs[k]) for k in self.hull)


def make_option_set(times: Sequence[float], costs: Sequence[float], knobs: Sequence[int]) -> OptionSet:
    """Keep the Pareto-optimal options and find their hull.

    Of options with the same time the cheapest is kept, of equal options the one with the smallest knob.

    Args:
        times: Time of each option in seconds, at least one, in any order.
        costs: Cost of each option in joules.
        knobs: Setting of each option.
    """
    options = sorted(zip(map(float, times), map(float, costs), map(int, knobs), strict=True))
    all_times, all_costs, _ = zip(*options, strict=True)
    kept = [options[number] for number in pareto_front(all_times, all_costs).tolist()]
    kept_times, kept_costs, kept_knobs = zip(*kept, strict=True)
    return OptionSet(kept_times, kept_costs, kept_knobs, _lower_hull(kept_times, kept_costs))


def pareto_front(times: Sequence[float] | Floats, costs: Sequence[float] | Floats) -> Integers:
    """Numbers of the points that are cheaper than all that are as fast, fast to slow: the only Pareto filter there is.

    Of equal points the first is taken.

    Args:
        times: Time of each point, in any order.
        costs: Cost of each point.
    """
    order = np.lexsort((np.asarray(costs, dtype=np.float64), np.asarray(times, dtype=np.float64)))
    in_order = np.asarray(costs, dtype=np.float64)[order]
    is_cheaper = np.ones(len(order), dtype=bool)
    is_cheaper[1:] = in_order[1:] < np.minimum.accumulate(in_order)[:-1]
    return np.asarray(order[is_cheaper])


def _lower_hull(x: Sequence[float], y: Sequence[float]) -> tuple[int, ...]:
    """Monotone chain (Andrew 1979): drop every corner that does not turn left."""
    hull: list[int] = []
    for c in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[c] - x[a]) < (y[c] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(c)
    return tuple(hull)
