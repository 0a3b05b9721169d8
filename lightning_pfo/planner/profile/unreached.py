"""Measurements at other clocks than the profile says: one point under a power cap, refused otherwise.

Above a power cap all requests end at the same clock, so their measurements are repetitions of one: chance decides which
of them looks fastest and which cheapest. They are given their mean. A clock that was not reached for another reason, or
was above the request because the GPU ignored it, says nothing about the request; a plan must not be made of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_pfo.core.errors import ProfileError
from lightning_pfo.core.flags import CLOCK_NOT_REACHED, is_capped
from lightning_pfo.core.wording import counted, listed
from lightning_pfo.planner.profile.profile import Profile
from lightning_pfo.planner.profile.repetitions import mean_of
from lightning_pfo.planner.profile.row import ProfileRow

Rank = tuple[str, ...]
_SAME_CLOCK = 0.01


def merge_capped(
    clocks: Mapping[int, Mapping[Rank, ProfileRow]], complete: Sequence[int]
) -> list[Mapping[Rank, ProfileRow]]:
    """Rows by rank of each complete clock, highest first; neighbours under the same power cap have their mean.

    Blocking powers stay: a GPU that waits does not meet its power limit, and runs at the clock that was asked for.
    """
    merged: list[Mapping[Rank, ProfileRow]] = []
    group: list[Mapping[Rank, ProfileRow]] = []
    for clock in complete:
        if group and not _are_the_same(group[0], clocks[clock]):
            merged += _mean(group)
            group = []
        group.append(clocks[clock])
    return merged + _mean(group)


def _are_the_same(one: Mapping[Rank, ProfileRow], other: Mapping[Rank, ProfileRow]) -> bool:
    pairs = [(one[rank], other[rank]) for rank in one]
    return all(is_capped(a.flags) and is_capped(b.flags) and _met(a, b) for a, b in pairs)


def _met(one: ProfileRow, other: ProfileRow) -> bool:
    """Whether both ran at the same clock, where that is known."""
    if one.clock_seen_mhz is None or other.clock_seen_mhz is None:
        return True
    return math.isclose(one.clock_seen_mhz, other.clock_seen_mhz, rel_tol=_SAME_CLOCK)


def _mean(group: Sequence[Mapping[Rank, ProfileRow]]) -> list[Mapping[Rank, ProfileRow]]:
    if len(group) < 2:
        return list(group)
    means = {rank: _mean_row([at_clock[rank] for at_clock in group]) for rank in group[0]}
    return [
        {
            rank: replace(mean, clock_mhz=row.clock_mhz, blocking_w=row.blocking_w, transfer_s=row.transfer_s)
            for rank, row in at_clock.items()
            for mean in (means[rank],)
        }
        for at_clock in group
    ]


def _mean_row(rows: Sequence[ProfileRow]) -> ProfileRow:
    time_s, time_stderr_s = mean_of([row.time_s for row in rows], [row.time_stderr_s for row in rows])
    energy_j, energy_stderr_j = mean_of([row.energy_j for row in rows], [row.energy_stderr_j for row in rows])
    return replace(
        rows[0],
        time_s=time_s,
        energy_j=energy_j,
        time_stderr_s=time_stderr_s,
        energy_stderr_j=energy_stderr_j,
    )


def check_reached(profile: Profile) -> None:
    """Check that every clock was really there when it was measured.

    Raises:
        ProfileError: If one was not.
    """
    unreached = [
        f"stage {stage} {kind.profile_name} at {clock} MHz"
        for (stage, kind), measured in profile.instructions.items()
        for clock in measured.unreached_mhz
    ]
    if unreached:
        raise ProfileError(
            "A plan is made of clocks that were really there when they were measured; "
            f"{counted(len(unreached), 'measurement')} of the profile "
            f"{'was' if len(unreached) == 1 else 'were'} not (flag {CLOCK_NOT_REACHED}): {listed(unreached)}. Find out "
            "with `lightning-pfo gpu probe=true` whether clocks can be set, and profile again; or plan on them all the "
            "same: use_unreached=true (plan.use_unreached=true of an experiment)."
        )
