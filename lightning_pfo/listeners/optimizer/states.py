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
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from lightning_pfo.core.errors import PfoError
from lightning_pfo.core.events import InstructionSource
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import counted
from lightning_pfo.device.time import HOST_TIME, time_of
from lightning_pfo.listeners.agreement import is_first
from lightning_pfo.listeners.gpu_session import GpuSession
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.optimizer.background import Background
from lightning_pfo.listeners.optimizer.checking import Checking
from lightning_pfo.listeners.optimizer.choosing.choice import bracket
from lightning_pfo.listeners.optimizer.choosing.decision import Decision, decide, only_ranks
from lightning_pfo.listeners.optimizer.choosing.objectives import Moment, objective_of
from lightning_pfo.listeners.optimizer.ledger import Ledger, State
from lightning_pfo.listeners.optimizer.measuring import Found, Measuring
from lightning_pfo.listeners.optimizer.memory import Keeper, Memory
from lightning_pfo.listeners.optimizer.replicas import Replicas
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.optimizer.verification import Verified, faster_plan
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.listeners.windows import Windows
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import save_frontier

log = logging.getLogger(__name__)

_CHECK_PAIRS = 2
_MOST_FALLBACKS = 3


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
        plan: The plan that was chosen; None until then.
        verified: What the windows have shown of it.
        ledger: What iterations took.
        memory: What was measured.
        notes: What has happened, in sentences.
        applied: What this replica follows: slower than `plan` beside a straggler.
        replicas: How long they are busy.
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
        self.plan: FrequencyPlan | None = None
        self.verified: Verified | None = None
        self.ledger = Ledger()
        self.memory = Memory({})
        self.notes: list[str] = []
        self.replicas = Replicas(source)
        self.schedule: PipelineSchedule | None = None
        self._source, self._session, self._run, self._settings = source, session, run, settings
        self._keeper, self._output_dir, self._job, self._report = keeper, output_dir, dict(job), report
        self._objective = objective_of(settings.select)
        self._background: Background[Decision] = Background(source, waits=time_of(session.gpu) is not HOST_TIME)
        self._latest: IterationMeasurement | None = None
        self._clocks_mhz: tuple[int, ...] = ()
        self._measuring: Measuring | None = None
        self._checking: Checking | None = None
        self.applied: FrequencyPlan | None = None
        self._only_stages: tuple[int, ...] | None = None
        self._is_recalled = False  # whether the plan is of what an earlier run has measured
        self._num_rounds = self._num_fallbacks = self._num_held = self._num_iterations = 0

    def after(self, iteration: int, measured: IterationMeasurement | None) -> None:
        """Take what an iteration was, and decide about the next one.

        Args:
            iteration: The one that has ended.
            measured: What was measured last: on CUDA the one before; None where that is not known.
        """
        self._num_iterations += 1
        if measured is None:
            return
        self._latest = measured
        self._note(measured)
        try:
            {
                State.WARM_UP: self._after_warm_up,
                State.MEASURE: self._after_measure,
                State.PLAN: self._after_plan,
                State.VERIFY: self._after_verify,
                State.HOLD: self._after_hold,
            }[self.state](iteration)
        except PfoError as error:  # the same on all ranks, which have exchanged it
            self._give_up(str(error))

    def close(self) -> None:
        """Stop; what was measured is kept."""
        self._stop_checking()
        if self._measuring is not None:
            self._measuring.close()
        self._background.close()
        self._save()

    def plan_of(self, iteration: int) -> FrequencyPlan | None:
        """The clocks of an iteration; None for the top clocks."""
        asked = self.applied
        if self.state in (State.WARM_UP, State.PLAN):
            asked = None
        elif self.state is State.MEASURE and self._measuring is not None:
            asked = self._measuring.plan
        elif self._checking is not None and not self._checking.is_under_plan(iteration):
            asked = None
        is_planned = asked is not None and self.state in (State.VERIFY, State.HOLD)
        self.ledger.begin(iteration, self.state, is_planned=is_planned)
        return asked

    def _note(self, measured: IterationMeasurement) -> None:
        """Keep what an iteration took; on CUDA that is the one before the last."""
        step, ledger = self.ledger.add(measured), self.ledger
        if not ledger.knows_top or step.state not in (State.MEASURE, State.PLAN):
            return
        if self._measuring is not None:
            self._measuring.spend(measured.time_s, ledger.top_s)
        self.memory = replace(
            self.memory,
            iterations=self.memory.iterations + 1,
            cost_s=self.memory.cost_s + measured.time_s - ledger.top_s,
            cost_j=self.memory.cost_j + measured.energy_j - ledger.top_j,
        )

    # ---- the beginning ----

    def begin_with(self, schedule: PipelineSchedule | None) -> None:
        """Begin for a pipeline that is known now: with what was kept of it, or anew. A collective call."""
        assert schedule is not None  # an iteration has begun
        if self.schedule is not None:
            self._say("the pipeline has another schedule now, so everything is measured anew.")
        self.schedule = schedule
        self._stop_checking()
        if self._measuring is not None:
            self._measuring.close()
        gpu = self._session.gpu
        told = self._source.all_gather(
            (self._source.rank, frozenset(gpu.supported_clocks_mhz()), self._fingerprint()), everywhere=True
        )
        common = frozenset.intersection(*(clocks for _, clocks, _ in told))
        config = self._session.config
        lowest = self._settings.min_clock_mhz or config.scan_min_mhz or 0
        highest = config.scan_max_mhz or math.inf
        self._clocks_mhz = tuple(sorted((mhz for mhz in common if lowest <= mhz <= highest), reverse=True))
        self.state, self.plan, self.frontier, self.applied = State.WARM_UP, None, None, None
        self._num_rounds = self._num_fallbacks = 0
        if len(bracket(self._clocks_mhz)) < 3:
            self._give_up("the GPUs have fewer than three clocks in common that may be measured.")
            return
        fingerprint = {name: " / ".join(sorted({one[name] for _, _, one in told})) for name in told[0][2]}
        self._measuring = Measuring(
            self._source, self._session, schedule, [self._clocks_mhz[0]] * schedule.num_ranks, self._settings
        )
        kept, refusal = self._keeper.recall(fingerprint) if is_first(self._source) else (None, None)
        kept, refusal = next(iter(self._source.all_gather((kept, refusal), everywhere=True)))
        if refusal:
            self._say(refusal)
        self.memory = kept or Memory(fingerprint)
        self._save()
        if kept is None or not kept.rows:
            return
        self._measuring.know(kept.rows)
        self._say(
            f"{counted(len(kept.rows), 'measurement')} of an earlier run "
            f"{'are complete' if kept.is_complete else 'are taken up'}."
        )
        if kept.is_complete:
            self._is_recalled = True
            self._consider(may_measure=False)
            self._background.finish()
            self._after_plan(-1)

    def _fingerprint(self) -> dict[str, str]:
        """What this rank knows of what measurements are of."""
        schedule, gpu = self._source.schedule, self._session.gpu
        assert schedule is not None
        return {
            "stages": str(schedule.num_stages),
            "schedule": schedule.name,
            "microbatches": str(schedule.num_microbatches),
            "gpu": gpu.name,
            "driver": str(getattr(gpu, "driver_version", "")),
            "torch": str(torch.__version__),
            **self._job,
        }

    # ---- states ----

    def _after_warm_up(self, iteration: int) -> None:
        assert self._measuring is not None
        if self.memory.rows and self._only_stages is None and not self.ledger.knows_top:
            # measured before: one iteration at the top clocks says what they take, and the rest is gone on with
            self._see_top()
            self._measure_bracket()
            return
        if not self._measuring.is_listening:
            self._measuring.measure_tops()
            return
        found = self._measuring.after_top()
        if found is None:
            return
        self._see_top()
        self._keep(found)
        self._measure_bracket()

    def _measure_bracket(self) -> None:
        """Measure those of the first clocks that are missing; plan if none is."""
        assert self._measuring is not None
        schedule, top_mhz = self._schedule_now, self._clocks_mhz[0]
        known = {(row.stage, row.frequency) for row in self.memory.rows}
        clocks = []
        for mhz in bracket(self._clocks_mhz)[1:]:
            missing = [stage for stage in range(schedule.num_stages) if (stage, mhz) not in known]
            if missing:
                clocks.append(only_ranks(schedule, missing, (mhz,) * schedule.num_ranks, top_mhz))
        if clocks:
            self._go(State.MEASURE)
            self._measuring.measure(clocks)
        else:
            self._go(State.PLAN)
            self._consider(may_measure=True)

    def _see_top(self) -> None:
        assert self._latest is not None
        self.ledger.take_for_top(self._latest.time_s, self._latest.energy_j)

    def _after_measure(self, iteration: int) -> None:
        assert self._measuring is not None
        found, is_done = self._measuring.after_probe()
        if found is not None:
            self._keep(found)
        if is_done:
            self._go(State.PLAN)
            self._num_rounds += 1
            self._consider(may_measure=self._num_rounds < self._settings.most_rounds)

    def _consider(self, *, may_measure: bool) -> None:
        """Let the first rank decide, beside the training."""
        self._background.start(
            partial(
                decide,
                self.memory,
                self._schedule_now,
                self._clocks_mhz,
                self._output_dir / "profile.csv",
                objective=self._objective,
                moment=self._moment,
                planning=self._settings.planning,
                may_measure=may_measure,
                stages=self._only_stages,
            )
        )

    def _after_plan(self, iteration: int) -> None:
        outcome = self._background.result()
        if outcome is None:
            return
        decision, problem = outcome
        if decision is None:
            self._give_up(problem)
        elif decision.next_mhz:
            assert self._measuring is not None
            self._go(State.MEASURE)
            self._measuring.measure(decision.next_mhz)
        else:
            self._apply(decision, iteration)

    def _apply(self, decision: Decision, iteration: int) -> None:
        self.frontier, self.plan = decision.frontier, decision.plan
        self.applied = decision.plan
        self.memory = replace(self.memory, is_complete=True)
        self._only_stages = None
        self._save()
        if is_first(self._source):
            save_frontier(decision.frontier, self._output_dir / "plans")
        base, plan = decision.frontier.baseline, decision.plan
        saving = 100 * (1 - plan.iteration_energy_j / base.iteration_energy_j)
        clocks = len({row.frequency for row in self.memory.rows})
        self._say(
            f"plan made after {counted(self.memory.iterations, 'iteration')} and {counted(clocks, 'clock')}: "
            f"{plan.iteration_time_s:.4g} s and {plan.iteration_energy_j:.5g} J predicted, {saving:.1f} % less than "
            f"the {base.iteration_energy_j:.5g} J of the top clocks; more measuring could gain "
            f"{100 * decision.gain_j / plan.iteration_energy_j:.2f} %."
        )
        self._verify(iteration)

    def _verify(self, iteration: int) -> None:
        self._go(State.VERIFY)
        self.verified = None
        self._check(iteration + 1, self._settings.pairs)

    def _check(self, first: int, pairs: int) -> None:
        tops = {
            (row.stage, row.instruction): row
            for row in self.memory.rows
            if row.frequency == self._clocks_mhz[0]
            and row.stage in self._source.stages
            and (row.dp_rank, row.tp_rank) == self._source.place
        }
        windows = Windows(pairs, self._settings.window_steps, self._settings.warmup_steps)
        self._checking = Checking(self._source, self._session, self._schedule_now, windows, first, tops)

    def _after_verify(self, iteration: int) -> None:
        found = self._after_check(iteration)
        if found is None:
            return
        assert self.frontier is not None
        assert self.plan is not None
        self.verified = found
        if not self.ledger.knows_top:  # what was measured before was enough
            self.ledger.take_for_top(found.baseline.iteration_time_s, found.baseline.iteration_energy_j)
        interval = found.saving_interval_percent
        between = "" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f} %)"
        self._say(
            f"measured in {counted(len(found.plan.windows), 'pair')} of windows: {found.saving_percent:.2f} %{between} "
            f"less energy, {found.slowdown_percent:+.2f} % time."
        )
        slower = faster_plan(self.frontier, self.plan, found, self._settings.tolerance)
        if slower is None and found.saving_percent <= 0 < self.frontier.baseline.iteration_energy_j:
            slower = self.frontier.baseline
        if slower is None or self.plan is self.frontier.baseline:
            self._hold()
            return
        self._num_fallbacks += 1
        if self._num_fallbacks > _MOST_FALLBACKS:
            slower = self.frontier.baseline
        promised = 100 * (self.plan.iteration_time_s / self.frontier.baseline.iteration_time_s - 1)
        self._say(
            f"the plan promised {promised:+.2f} % time and takes {found.slowdown_percent:+.2f} %, so a faster one is "
            f"taken: {slower.iteration_time_s:.4g} s and {slower.iteration_energy_j:.5g} J."
        )
        self.plan = self.applied = slower
        self._verify(iteration)

    def _after_check(self, iteration: int) -> Verified | None:
        """What the windows have shown, when they are over; a collective call then."""
        assert self._checking is not None
        assert self._latest is not None
        self._checking.after(iteration)
        if not self._checking.is_over(self._latest.iteration):
            return None
        found = self._checking.found(self._run)
        changed = self._checking.changed_stages()
        self._stop_checking()
        if changed and (self.state is State.HOLD or self._is_recalled):  # measured lately otherwise
            self._is_recalled = False
            self._remeasure(changed)
            return None
        return found

    def _remeasure(self, stages: tuple[int, ...]) -> None:
        assert self._measuring is not None
        names = ", ".join(map(str, stages))
        self._say(f"time or energy of stage {names} at the top clock has changed, which is measured anew.")
        self.memory = self.memory.without_stages(stages)
        self._only_stages = stages
        self._num_rounds = self._num_fallbacks = 0
        self._go(State.WARM_UP)
        self._measuring.measure_tops()

    def _hold(self) -> None:
        self._go(State.HOLD)
        self._num_held = 0

    def _after_hold(self, iteration: int) -> None:
        self._num_held += 1
        if self._checking is not None:
            found = self._after_check(iteration)
            if found is not None and self.verified is not None:
                self.verified = self.verified.and_more(found)
        elif self.frontier is None:
            return
        elif self._settings.check_every and self._num_held % self._settings.check_every == 0:
            self._check(iteration + 1, _CHECK_PAIRS)
        elif self._num_held % self._settings.look_every == 0:
            self._look_round()

    def _look_round(self) -> None:
        """Follow the objective, and stragglers; a collective call."""
        assert self.frontier is not None
        assert self.plan is not None
        assert self.applied is not None
        number: int | None = None
        if is_first(self._source) and self._num_fallbacks == 0:
            wanted = self._objective.plan_of(self.frontier, self._moment)
            number = next((n for n, plan in enumerate(self.frontier.plans) if plan is wanted), None)
        error = self._session.clocks.error
        told = self._source.all_gather((number, error and str(error)), everywhere=True)
        failure = next((met for _, met in told if met), None)
        if failure is not None:
            self._give_up(failure)
            return
        number = told[0][0]
        if number is not None and self.frontier.plans[number].iteration_time_s != self.plan.iteration_time_s:
            self.plan = self.frontier.plans[number]
            self._say(f"the objective asks for a plan of {self.plan.iteration_time_s:.4g} s now.")
        plans = self.replicas.wanted(self.frontier, self.plan, self.applied)
        if plans is not None:
            self.applied = replace(plans[self._source.place[0]])  # a new object everywhere: checked together
            self._say(f"plans of {', '.join(f'{plan.iteration_time_s:.4g} s' for plan in plans.values())} now.")

    def _give_up(self, problem: str) -> None:
        """Run at the top clocks from now on."""
        self.problem = problem
        self._stop_checking()
        if self._measuring is not None:
            self._measuring.rest()
        self.applied = None
        self.state = State.HOLD
        if is_first(self._source):
            log.warning("Training goes on at the top clocks, without a plan: %s", problem)
        self.notes.append(f"No plan is applied: {problem}")
        self.frontier = None

    # ---- what states share ----

    @property
    def _schedule_now(self) -> PipelineSchedule:
        assert self.schedule is not None
        return self.schedule

    @property
    def _moment(self) -> Moment:
        total = self._settings.num_iterations
        return Moment.now(None if total is None else max(total - self._num_iterations, 0))

    def _go(self, state: State) -> None:
        if state is not self.state:
            self._report(f"{self.state.value} -> {state.value} after {counted(self._num_iterations, 'iteration')}.")
        self.state = state

    def _say(self, text: str) -> None:
        self._report(text)
        self.notes.append(text[0].upper() + text[1:])

    def _keep(self, found: Found) -> None:
        self.memory = replace(self.memory.with_rows(found.rows), latencies_s=found.latencies_s)
        self._save()

    def _save(self) -> None:
        if is_first(self._source):
            self._keeper.save(self.memory)

    def _stop_checking(self) -> None:
        if self._checking is not None:
            self._checking.close()
            self._checking = None
