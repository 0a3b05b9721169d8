"""What an option costs where the setting before it lasts on for a while.

A machine goes through its nodes in order, one *lane* of the network. Each option is a setting of the machine, and a
setting that is asked for when a node ends takes effect only after a latency: the next node begins at the old one::

    setting of      |  node 1 ............ |  node 2 .................. |
    machine       ~~~~~~~~~~ of node 1 ~~~~~~~~~~~ | of node 2 ~~~~~~~~~~~~~~
                                           |latency|

The share of a node's work that is done by then costs that share of the time and the cost at the old setting. Both are
mixtures of options, which the relaxation covers, so that its flows value them, and its bounds hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_pfo.planner.network.arrays import Floats, Integers


@dataclass(frozen=True, eq=False)
class LateSettings:
    """The lanes of a network, and what the settings of its machines cost there.

    Attributes:
        lane_of: Lane of each node.
        num_lanes: How many there are.
        setting_of: Setting of each option of each kind of node, shape (kinds, options); padding may be any.
        times: Time of a node of each kind at each setting in seconds, shape (kinds, settings).
        costs: Its cost in joules, likewise.
        latencies: Time from a request until the setting changes in seconds, by the old one and the new one; a single
            number where all are equal.
        change_cost: What a change of the setting costs beyond that, in joules.
    """

    lane_of: Sequence[int]
    num_lanes: int
    setting_of: Integers
    times: Floats
    costs: Floats
    latencies: Floats
    change_cost: float

    def extra(self, kind: int, options: Integers, old: Integers, wait: Floats) -> tuple[Floats, Floats]:
        """What options of a node cost beyond what they would at their own setting from the beginning.

        Args:
            kind: Kind of the node.
            options: Options tried, shape (options, guides).
            old: Setting of the lane before, shape (assignments, guides).
            wait: Time since the node before in the lane has ended in seconds, shaped as `old`.

        Returns:
            Time in seconds and cost in joules, shape (options, assignments, guides).
        """
        new = self.setting_of[kind][options][:, None]
        times, costs = self.times[kind], self.costs[kind]
        old_times = times[old]
        latencies = self.latencies if self.latencies.ndim == 0 else self.latencies[old, new]
        share = np.minimum(np.maximum(latencies - wait, 0.0) / old_times, 1.0)
        extra_costs = share * (costs[old] - costs[new])
        if self.change_cost:
            extra_costs += self.change_cost * (old != new)
        return share * (old_times - times[new]), extra_costs


class Lanes:
    """When the last node of each lane ended, and at which setting, for partial assignments side by side.

    Attributes:
        ends: In seconds, shape (lanes, assignments, guides).
        settings: Shaped alike; those of lanes that have not begun mean nothing.
    """

    def __init__(self, late: LateSettings, num_guides: int) -> None:
        self._late = late
        self._has_begun = [False] * late.num_lanes
        self.ends = np.zeros((late.num_lanes, 1, num_guides))
        self.settings = np.zeros((late.num_lanes, 1, num_guides), dtype=np.int64)

    def extra(self, node: int, kind: int, options: Integers, starts: Floats) -> tuple[Floats, Floats] | None:
        """What the options of a node cost beyond their own; None for the first of a lane.

        Args:
            node: The node.
            kind: Its kind.
            options: Options tried, shape (options, guides).
            starts: When it starts in seconds, shape (assignments, guides).
        """
        lane = self._late.lane_of[node]
        if not self._has_begun[lane]:
            return None
        return self._late.extra(kind, options, self.settings[lane], starts - self.ends[lane])

    def keep(self, node: int, kind: int, options: Integers, ends: Floats, parents: Integers, kept: Integers) -> None:
        """Go on with the candidates that were kept.

        Args:
            node: The node that they have an option for now.
            kind: Its kind.
            options: Options tried, shape (options, guides).
            ends: When it ends in each candidate, shape (options, assignments, guides).
            parents: Which partial assignment each was, as an index into flat (assignments, guides).
            kept: Which candidate it is, as an index into flat `ends`.
        """
        lane = self._late.lane_of[node]
        num = self._late.num_lanes
        self._has_begun[lane] = True
        self.ends = self.ends.reshape(num, -1).take(parents, axis=1)
        self.settings = self.settings.reshape(num, -1).take(parents, axis=1)
        self.ends[lane] = ends.ravel()[kept]
        new = np.broadcast_to(self._late.setting_of[kind][options][:, None], ends.shape)
        self.settings[lane] = new.ravel()[kept]
