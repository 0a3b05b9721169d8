"""Whether a plan keeps what it promises, over the wire: a round for each window, at the top clocks and under it.

::

    round     12    13    14    15    16    17  ...  23     24
    clocks   top   plan  plan   top   top  plan ...  top    plan   (six pairs of windows; then it is held)
                                                        ^ late: a faster plan, which is tried in the same way

A window is a plan of the job as any other: all ranks change to it at one step, measure, and report. Each says which
trial it is of, so that a server that was killed goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.planner.adaptive.verification import Verified, faster_by, lateness_s
from lightning_pfo.planner.adaptive.windows import Window, Windowed, Windows, change_percent
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.select import select_plan
from lightning_pfo.server.jobs.director import rows_of
from lightning_pfo.server.jobs.measurements import Round, iteration_of
from lightning_pfo.server.jobs.messages import PlanRows

VERIFY = "verify"
"""The purpose of windows."""

_MOST_TRIALS = 4


@dataclass(frozen=True)
class Trial:
    """One window of a trial.

    Attributes:
        number: Which trial: those before were of plans that were late.
        plan: Number of the plan in its frontier.
        window: Which window.
    """

    number: int
    plan: int
    window: int


class Verifying:
    """Tries plans, each in windows.

    Args:
        pairs: Pairs of windows of each trial; 0 holds every plan as it is.
        tolerance: How much later a plan may be than the one that was asked for promises, as a share of the top clocks'
            time.
    """

    def __init__(self, pairs: int, tolerance: float) -> None:
        self._windows, self._tolerance = Windows(pairs, 1, 0), tolerance

    def begin(self, frontier: Frontier, plan: FrequencyPlan, select: str, number: int = 0) -> PlanRows:
        """The first window of a plan.

        Args:
            frontier: The plans.
            plan: The one to try.
            select: Which of them was asked for.
            number: How many were late before.
        """
        if not self._windows.num_pairs:
            return rows_of(frontier, plan, select)
        return self._rows(frontier, Trial(number, frontier.plans.index(plan), 0), select)

    def after(self, frontier: Frontier, trial: Trial, select: str, rounds: Sequence[Round]) -> PlanRows:
        """What follows on a window: the next one, or a faster plan, or what is held.

        Args:
            frontier: The plans.
            trial: The window that is over.
            select: Which of the plans was asked for.
            rounds: All rounds of its trial.
        """
        plan, label = frontier.plans[trial.plan], _label(frontier, trial, select)
        if iteration_of(rounds[-1]) is None:
            return rows_of(frontier, plan, f"{label}, not verified: ranks report no iter_time and iter_energy")
        if trial.window + 1 < self._windows.num_steps:
            return self._rows(frontier, replace(trial, window=trial.window + 1), select)
        found = self._found(rounds)
        if found.saving_percent <= 0:
            return _top_clocks(frontier, f"{label} saved nothing ({found.saving_percent:.2f} %)")
        # of what was asked for: a faster plan that is late by as much is in time
        late_s = lateness_s(frontier, select_plan(frontier, select).iteration_time_s, found, self._tolerance)
        if not late_s:
            return replace(rows_of(frontier, plan, label), verified=_as_dict(found))
        faster = faster_by(frontier, plan, late_s)
        if faster is frontier.baseline or trial.number + 1 == _MOST_TRIALS:
            return _top_clocks(frontier, f"{label} took {found.slowdown_percent:+.2f} % time")
        return self.begin(frontier, faster, select, trial.number + 1)

    def _rows(self, frontier: Frontier, trial: Trial, select: str) -> PlanRows:
        is_plan = self._windows.place_of(trial.window)[1]
        plan = frontier.plans[trial.plan] if is_plan else frontier.baseline
        clocks = _label(frontier, trial, select) if is_plan else "top clocks"
        label = f"window {trial.window + 1} of {self._windows.num_steps}: {clocks}"
        return replace(rows_of(frontier, plan, label), purpose=VERIFY, trial=asdict(trial))

    def _found(self, rounds: Sequence[Round]) -> Verified:
        measured = {entry["trial"]["window"]: iteration_of(entry) for entry in rounds}
        windows: dict[bool, list[Window]] = {False: [], True: []}
        for window in range(self._windows.num_steps):  # of both kinds, in the order of pairs
            time_s, energy_j = measured[window] or (0.0, 0.0)
            windows[self._windows.place_of(window)[1]].append(Window((time_s,), (energy_j,)))
        return Verified(Windowed(tuple(windows[False])), Windowed(tuple(windows[True])))


def _top_clocks(frontier: Frontier, reason: str) -> PlanRows:
    return rows_of(frontier, frontier.baseline, f"top clocks, as {reason}")


def _label(frontier: Frontier, trial: Trial, select: str) -> str:
    if not trial.number:
        return select
    promised = change_percent(frontier.plans[trial.plan].iteration_time_s, frontier.baseline.iteration_time_s)
    return f"{select} but faster, as that was late ({promised:+.2f} % promised now)"


def _as_dict(found: Verified) -> dict[str, object]:
    return {
        "pairs": len(found.plan.windows),
        "saving_percent": found.saving_percent,
        "saving_interval_percent": found.saving_interval_percent,
        "slowdown_percent": found.slowdown_percent,
        "slowdown_interval_percent": found.slowdown_interval_percent,
        "iteration_time_s": found.plan.iteration_time_s,
        "iteration_energy_j": found.plan.iteration_energy_j,
    }
