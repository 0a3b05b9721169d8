"""How much work a search does. Work is bounded by counting it, never by a clock: the same problem gets the same plans.

A search goes through rounds, cheap to dear, and stops when no target is open (`targets`). What a round may cost grows
with the number of nodes and of targets only: a guide costs its width at every node, and there are at most
`guides_per_target` guides to a target of the frontier. So where gaps cannot be closed, because rounding must lose that
much, trying is given up after a while.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.wording import did_you_mean


class Aim(NamedTuple):
    """How one guide of a target differs from the others; several that differ find more than a wide beam for one.

    Attributes:
        offset: What is aimed at beyond the target's time: in units of how far that may be missed, or, where it must be
            kept to, of `Effort.step`.
        meeting: Share of the lags at present that is expected to be lost.
        haste: What being late costs beyond its loss, in units of the expected loss at a meeting.
        patience: What being early costs beyond its loss, likewise.
    """

    offset: float
    meeting: float
    haste: float
    patience: float


@dataclass(frozen=True)
class Round:
    """What is done at the targets that are still open, those of the largest gaps first.

    Attributes:
        width: Partial assignments that a beam keeps for each guide.
        options_per_node: Options that it tries at each node.
        free_aims: Guides of a target whose time may be missed a little.
        kept_aims: Guides of a target whose time must be kept to.
        guides_per_target: At most so many guides, for each target of the frontier, open or not.
        spliced_pairs: Pairs of assignments joined for each open target.
        seams: Assignments for a time to keep to are joined with each other at so many places.
        sweeps: How often the events of the best assignments are moved.
        moved_per_target: At most so many assignments are, for each target of the frontier.
    """

    width: int
    options_per_node: int
    free_aims: tuple[Aim, ...]
    kept_aims: tuple[Aim, ...]
    guides_per_target: float
    spliced_pairs: int
    seams: int
    sweeps: int
    moved_per_target: float


@dataclass(frozen=True)
class Effort:
    """How hard to search.

    Attributes:
        rounds: Cheap to dear.
        points_per_relaxation: The relaxation is solved once for so many points of the frontier before the first round.
        own_relaxations: From the second round on, so many of the open targets get a relaxation of their own in each.
        nodes_per_sharpened_flow: Before the last round, what rounding loses at least is proven for at most one flow per
            so many nodes: a flow costs about the same however often the network repeats itself.
        largest_gap: A target is open while its gap exceeds this,
        median_gap: or this while the median of all targets does;
        kept_gap: a time to keep to, such as the top clocks', while its gap exceeds this.
        long_sweeps: In very long pipelines, sweeps of event moves; slack is spent after each number of them.
        iterations_per_node: The last round is left out where the simplex method took more iterations per node for the
            relaxations of the first: everything costs more there.
        short: What is done instead in networks of at most `SHORT_NETWORK` nodes.
    """

    rounds: tuple[Round, ...]
    points_per_relaxation: float = 5.2
    own_relaxations: int = 5
    nodes_per_sharpened_flow: int = 32
    largest_gap: float = 0.0022
    median_gap: float = 0.001
    kept_gap: float = 0.0018
    long_sweeps: tuple[int, ...] = (8, 4)
    iterations_per_node: float = math.inf
    short: Effort | None = None


_LOOSE, _STRICT = (0.1, 0.0, 0.0), (0.1, 1.0, 0.3)
"""Being late or early costs nothing but what is lost; or it costs more, so that slack is not hoarded."""

_FREE = (Aim(0.0, *_LOOSE),)
_KEPT = (Aim(0.0, 0.2, 0.0, 0.0), Aim(0.0, 0.2, 1.0, 0.3), Aim(1.0, *_STRICT), Aim(0.0, *_LOOSE))
"""Loose and strict, lags counted twice as much or not; strict ones too late a little, as the deadline holds anyway."""

_MORE_FREE = (*_FREE, *(Aim(offset, *weights) for offset in (-0.5, 0.5) for weights in (_LOOSE, _STRICT)))
_MORE_KEPT = (*_KEPT, *(Aim(offset, *weights) for offset in (2, -1, -2, -4) for weights in (_LOOSE, _STRICT)))
"""The same at other times around: there are few times to keep to, and much depends on them."""

SHORT_NETWORK = 320
"""Nodes up to which a network is short: what does not grow with it (levels, calls, sorts of what it repeats) costs as
much as what does, while a single option that does not fit is a larger part of the whole."""

_FIRST = Round(5, 4, _FREE, _KEPT[:1], 2.0, 1, 0, 2, 0.0)
_SECOND = Round(12, 8, _FREE, _MORE_KEPT[:7], 0.7, 4, 12, 2, 0.3)
_WIDER_SECOND = replace(_SECOND, width=24)
_THIRD = Round(32, 8, _FREE, _MORE_KEPT, 0.2, 6, 12, 2, 0.2)

EFFORTS: Mapping[str, Effort] = MappingProxyType(
    {
        "fast": Effort(
            (_FIRST, Round(5, 4, _FREE, _KEPT, 0.3, 2, 0, 2, 0.3)),
            own_relaxations=2,
            nodes_per_sharpened_flow=200,
            long_sweeps=(4,),
        ),
        "default": Effort(
            (_FIRST, _WIDER_SECOND, _THIRD),
            largest_gap=0.0016,
            kept_gap=0.0016,
            short=Effort((_FIRST, _SECOND, _THIRD), iterations_per_node=4.5),
        ),
        "best": Effort(
            (
                _FIRST,
                _SECOND,
                _THIRD,
                Round(32, 8, _MORE_FREE, _MORE_KEPT, 3.0, 6, 24, 4, 1.0),
                Round(64, 8, _MORE_FREE, _MORE_KEPT, 3.0, 8, 24, 8, 2.0),
            ),
            own_relaxations=16,
            nodes_per_sharpened_flow=1,
            largest_gap=0.001,
            median_gap=0.0003,
            kept_gap=0.0005,
            long_sweeps=(16, 8),
        ),
    }
)
"""By name; `default` is what fits the time that a profile takes to be measured, whatever the profile."""


def find_effort(name: str | Effort, num_nodes: int = SHORT_NETWORK + 1) -> Effort:
    """The effort of a name; one of your own is taken as it is.

    Args:
        name: Of the effort, or the effort itself.
        num_nodes: Nodes of the network.

    Raises:
        ConfigurationError: If there is none of this name.
    """
    if isinstance(name, Effort):
        return name.short or name if num_nodes <= SHORT_NETWORK else name
    if name not in EFFORTS:
        raise ConfigurationError(
            f"effort is one of {', '.join(EFFORTS)}; got {str(name)[:40]!r}.{did_you_mean(str(name)[:40], EFFORTS)}"
        )
    return find_effort(EFFORTS[name], num_nodes)
