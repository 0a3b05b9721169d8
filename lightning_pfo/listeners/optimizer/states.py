"""The states of a run that optimises itself: with which clocks an iteration runs, and what is done at its end.

::

    WarmUp -> Measure <-> Plan -> Verify -> Hold
      ^                            |  ^       |
      |                            +--+       |    a faster plan, where this one is late
      +---------------------------------------+    what has changed is measured again

What is done at the end of an iteration is done on all ranks: there they exchange what they have met, so that all are in
the same state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.device.time import HOST_TIME, time_of
from lightning_pfo.listeners.agreement import is_first, name_of
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.optimizer.background import Background
from lightning_pfo.listeners.optimizer.beginning import begin, measurable_clocks
from lightning_pfo.listeners.optimizer.choosing.decision import Decision, decide, missing_clocks
from lightning_pfo.listeners.optimizer.choosing.objectives import Moment, objective_of
from lightning_pfo.listeners.optimizer.following import Following
from lightning_pfo.listeners.optimizer.ledger import Cost, Ledger, State
from lightning_pfo.listeners.optimizer.measuring import Found, Measuring
from lightning_pfo.listeners.optimizer.memory import Keeper, Memory
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.optimizer.verifying.trial import Trial
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.planner.adaptive.choice import bracket
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import save_frontier

log = logging.getLogger(__name__)

_CHECK_PAIRS = 2


class States:
    """Moves from state to state; every method but the properties is called on all ranks alike.

    Args:
        source: The pipeline rank.
        session: Its GPU.
        run: Sets the clocks and measures iterations.
        settings: What is wanted.
        keeper: Where measurements are kept.
        output_dir: Where the profile and the plans go.
        job: What else measurements depend on.
        report: Told about progress.

    Attributes:
        state: Where it is.
        problem: Why there is no plan, if there will be none.
        frontier: What is possible; None until it is known.
        following: The plan that was chosen, and the one that this replica follows.
        trial: What windows have shown of it.
        ledger: What iterations took.
        memory: What was measured.
        notes: What has happened, in sentences.
        schedule: What is executed; None until it is known.
    """

    def __init__(
        self,
        source: InstructionSource,
        session: GpuSession,
        run: PlannedRun,
        *,
        settings: OptimizerSettings,
        keeper: Keeper,
        output_dir: Path,
        job: Mapping[str, str],
        report: Callable[[str], None],
    ) -> None:
        self.state = State.WARM_UP
        self.problem: str | None = None
        self.frontier: Frontier | None = None
        self.trial = Trial(source, session, run, settings)
        self._objective = objective_of(settings.select)
        self.following = Following(source, session, self._objective, self.trial)
        self.ledger = Ledger()
        self.memory = Memory({})
        self._before = Cost()  # of measuring, by earlier runs
        self.notes: list[str] = []
        self.schedule: PipelineSchedule | None = None
        self._source, self._session, self._settings = source, session, settings
        self._keeper, self._output_dir, self._job, self._report = keeper, output_dir, job, report
        self._background: Background[Decision] = Background(source, waits=time_of(session.gpu) is not HOST_TIME)
        self._clocks_mhz: tuple[int, ...] = ()
        self._measuring: Measuring | None = None
        self._changed: tuple[int, ...] | None = None  # only these stages are measured anew
        self._is_recalled = False  # whether the plan is of what an earlier run has measured
        self._num_rounds = self._num_held = self._num_iterations = 0

    def after(self, iteration: int, measured: IterationMeasurement | None) -> None:
        """Take what an iteration was, and decide about the next one.

        Args:
            iteration: The one that has ended.
            measured: What was measured last: on CUDA the one before; None where that is not known.
        """
        self._num_iterations += 1
        if measured is None:
            self._see_whether_it_ever_is()
            return
        self._note(measured)
        after_state = {
            State.WARM_UP: self._after_warm_up,
            State.MEASURE: self._after_measure,
            State.PLAN: self._after_plan,
            State.VERIFY: self._after_verify,
            State.HOLD: self._after_hold,
        }[self.state]
        try:
            after_state(iteration, measured)
        except PfoError as error:  # the same on all ranks, which have exchanged it
            self._give_up(str(error))

    def plan_of(self, iteration: int) -> FrequencyPlan | None:
        """The clocks of an iteration; None for the top clocks."""
        asked: FrequencyPlan | None = None
        if self.state is State.MEASURE:
            asked = self._measurer.plan
        elif self.state in (State.VERIFY, State.HOLD) and self.trial.is_under_plan(iteration):
            asked = self.following.applied
        self.ledger.begin(iteration, self.state, asked, self._clocks_mhz[0] if self._clocks_mhz else 0)
        return asked

    def close(self) -> None:
        """Stop; what was measured is kept."""
        self.trial.stop()
        if self._measuring is not None:
            self._measuring.close()
        self._background.close()
        self._save()

    # ---- WarmUp: what is known of the pipeline, then the top clocks ----

    def begin_with(self, schedule: PipelineSchedule | None, iteration: int) -> None:
        """Begin for a pipeline that is known now: with what was kept of it, or anew. A collective call.

        Args:
            schedule: What is executed from now on.
            iteration: The first one of it, which is about to begin.
        """
        assert schedule is not None  # an iteration has begun
        if self.schedule is not None:
            self._say("the pipeline has another schedule now, so everything is measured anew.")
        self.schedule = schedule
        self._forget()
        beginning = begin(self._source, self._session, schedule, self._keeper, self._job)
        self.memory = kept = beginning.memory
        self._before = Cost(kept.iterations, kept.cost_s, kept.cost_j)
        for note in beginning.notes:
            self._say(note)
        try:
            self._clocks_mhz = measurable_clocks(self._source, self._session, self._settings)
        except PfoError as error:  # likewise
            self._give_up(str(error))
            return
        tops_mhz = [self._clocks_mhz[0]] * schedule.num_ranks
        self._measuring = Measuring(
            self._source, self._session, schedule, tops_mhz, self._settings, lambda: self.ledger.measuring_slowdown
        )
        self._measuring.know(self.memory.rows, self.memory.latencies_s)
        self._save()
        if self.memory.is_complete:
            self._is_recalled = True
            self._consider(may_measure=False)
            self._background.finish()
            self._after_plan(iteration - 1)

    def _forget(self) -> None:
        """Be as at the beginning."""
        self.trial.forget()
        self.ledger.forget_top()
        if self._measuring is not None:
            self._measuring.close()
        self.state, self.problem = State.WARM_UP, None
        self.frontier = self._measuring = self._changed = None
        self.following.take(None)
        self._num_rounds, self._is_recalled = 0, False

    def _after_warm_up(self, iteration: int, measured: IterationMeasurement) -> None:
        if self.memory.rows and self._changed is None:
            if not self.ledger.knows_top:
                return
        elif self._measurer.is_listening:
            found = self._measurer.after_top()
            if found is None:
                return
            self._keep(found)
        else:
            self._measurer.measure_tops()
            return
        self._measure_bracket()

    # ---- Measure: the first clocks, then those that Plan asks for ----

    def _measure_bracket(self) -> None:
        """Measure those of the first clocks that are missing; plan if none is."""
        clocks = missing_clocks(self.memory.rows, self._schedule_now, bracket(self._clocks_mhz))
        if clocks:
            self._go(State.MEASURE)
            self._measurer.measure(clocks)
        else:
            self._go(State.PLAN)
            self._consider(may_measure=True)

    def _after_measure(self, iteration: int, measured: IterationMeasurement) -> None:
        found, is_done = self._measurer.after_probe()
        if found is not None:
            self._keep(found)
        if is_done:
            self._go(State.PLAN)
            self._num_rounds += 1
            self._consider(may_measure=self._num_rounds < self._settings.most_rounds)

    # ---- Plan: beside the training ----

    def _consider(self, *, may_measure: bool) -> None:
        """Let the first rank decide."""
        self._background.start(
            partial(
                decide,
                self.memory,
                self._schedule_now,
                self._clocks_mhz,
                self._output_dir / "profile.csv",
                self._keeper.files,
                objective=self._objective,
                moment=self._moment,
                planning=self._settings.planning,
                may_measure=may_measure,
                stages=self._changed,
            )
        )

    def _after_plan(self, iteration: int, measured: IterationMeasurement | None = None) -> None:
        outcome = self._background.result()
        if outcome is None:
            return
        decision, problem = outcome
        if decision is None:
            self._give_up(problem)
        elif decision.next_mhz:
            self._go(State.MEASURE)
            self._measurer.measure(decision.next_mhz)
        else:
            self._take(decision)
            self._verify(decision.plan, iteration)

    def _take(self, decision: Decision) -> None:
        """Keep what was decided."""
        self.frontier, self._changed = decision.frontier, None
        self.memory = replace(self.memory, is_complete=True)
        self._save()
        if is_first(self._source):
            plans = self._output_dir / "plans"
            self._keeper.files.write(plans, partial(save_frontier, decision.frontier, plans))
        self._say(f"plan made after {self.memory}: {decision}.")
        self.trial.forget()

    # ---- Verify: the plan and the top clocks in turn ----

    def _verify(self, plan: FrequencyPlan, iteration: int) -> None:
        self.following.take(plan)
        self._go(State.VERIFY)
        self._try(iteration + 1, self._settings.pairs)

    def _try(self, first: int, pairs: int) -> None:
        applied = self.following.applied
        assert applied is not None
        self.trial.begin(applied, pairs, first, self.memory, self._schedule_now, self._clocks_mhz[0])

    def _after_verify(self, iteration: int, measured: IterationMeasurement) -> None:
        outcome = self.trial.after(iteration, measured.iteration)
        if outcome is None:
            return
        is_old, self._is_recalled = self.state is State.HOLD or self._is_recalled, False
        if outcome.changed and is_old:  # measured lately otherwise
            self._remeasure(outcome.changed)
            return
        if outcome.found is not None:
            self._say(f"measured in {outcome.found}.")
        assert self.frontier is not None
        instead = self.trial.instead(self.frontier, self._say)
        if instead is not None:
            self._verify(instead, iteration)
        elif self.state is State.VERIFY:
            self._go(State.HOLD)
            self._num_held = 0

    def _remeasure(self, stages: tuple[int, ...]) -> None:
        names = ", ".join(map(str, stages))
        self._say(f"time or energy of stage {names} at the top clock has changed, which is measured anew.")
        self.memory = self.memory.without_stages(stages)
        self._changed, self._num_rounds = stages, 0
        self._go(State.WARM_UP)
        self._measurer.measure_tops()

    # ---- Hold: the plan, looked at now and then ----

    def _after_hold(self, iteration: int, measured: IterationMeasurement) -> None:
        self._num_held += 1
        if self.trial.is_under_way:
            self._after_verify(iteration, measured)
        elif self.frontier is None:
            return
        elif self._settings.check_every and self._num_held % self._settings.check_every == 0:
            self._try(iteration + 1, _CHECK_PAIRS)
        elif self._num_held % self._settings.look_every == 0:
            for change in self.following.look_round(self.frontier, self._moment):
                self._say(change)

    def _give_up(self, problem: str) -> None:
        """Run at the top clocks from now on."""
        self.problem = problem
        self.trial.stop()
        if self._measuring is not None:
            self._measuring.rest()
        self.following.take(None)
        self.state, self.frontier = State.HOLD, None
        if is_first(self._source):
            log.warning("Training goes on at the top clocks, without a plan: %s", problem)
        self.notes.append(f"No plan is applied: {problem}")

    # ---- what states share ----

    @property
    def _schedule_now(self) -> PipelineSchedule:
        assert self.schedule is not None
        return self.schedule

    @property
    def _measurer(self) -> Measuring:
        assert self._measuring is not None
        return self._measuring

    @property
    def _moment(self) -> Moment:
        total = self._settings.num_iterations
        return Moment.now(None if total is None else max(total - self._num_iterations, 0))

    def _see_whether_it_ever_is(self) -> None:
        """Give up where a GPU is not followed any more: no iteration is measured from then on. A collective call."""
        if self.problem is not None:
            return
        error = self._session.clocks.error if self._session.follower.has_ended else None
        met = None if error is None else f"{name_of(self._source)}: {error}"
        told = [one for one in self._source.all_gather(met, everywhere=True) if one is not None]
        if told:
            self._give_up(told[0])

    def _go(self, state: State) -> None:
        if state is not self.state:
            self._report(f"{self.state.value} -> {state.value} after {counted(self._num_iterations, 'iteration')}.")
        self.state = state

    def _say(self, text: str) -> None:
        self._report(text)
        self.notes.append(text[0].upper() + text[1:])

    def _note(self, measured: IterationMeasurement) -> None:
        """Keep what an iteration took; on CUDA that is the one before the last."""
        self.ledger.add(measured)
        before, now = self._before, self.ledger.measuring
        self.memory = replace(
            self.memory,
            iterations=before.iterations + now.iterations,
            cost_s=before.time_s + now.time_s,
            cost_j=before.energy_j + now.energy_j,
        )

    def _keep(self, found: Found) -> None:
        self.memory = replace(self.memory.with_rows(found.rows), latencies_s=found.latencies_s)
        self._save()

    def _save(self) -> None:
        if is_first(self._source):
            self._keeper.save(self.memory)
