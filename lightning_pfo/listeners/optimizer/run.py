"""A training that optimises itself, in any loop: what `PipelineFrequencyOptimizerCallback` does, without a Trainer.

What happens in it is told by `states`. Nothing in it may end a training: where clocks cannot be set, or no plan can be
made, the rest runs at the top clocks, and `problem` says why.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource
from lightning_pfo.core.files import check_can_write, write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan, saving_percent
from lightning_pfo.device.time import time_of
from lightning_pfo.listeners.agreement import check_together, is_first
from lightning_pfo.listeners.gpu_session import (
    DEFAULT_CLUSTER,
    ClusterChoice,
    GpuChoice,
    open_session,
    ranks_on_this_node,
)
from lightning_pfo.listeners.meters.iterations import IterationMeasurement
from lightning_pfo.listeners.optimizer.ledger import Ledger, State
from lightning_pfo.listeners.optimizer.memory import Keeper, Memory
from lightning_pfo.listeners.optimizer.settings import OptimizerSettings
from lightning_pfo.listeners.optimizer.states import States
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.planner.adaptive.verification import Verified
from lightning_pfo.planner.frontier.data import Frontier

log = logging.getLogger(__name__)

_TOLD = 2_000
"""Iterations that the report tells of."""


_VERIFIED = ("saving_percent", "saving_interval_percent", "slowdown_percent", "slowdown_interval_percent")
"""Of the summary: known when a plan was verified."""


class OptimizedRun(InstructionListener):
    """Measures, plans, applies and verifies while a pipeline trains; `close` it, or use it as a context manager.

    Args:
        source: The pipeline rank, e.g. `PipelinedModel.instruction_source`.
        output_dir: Where the profile, the plans and what was measured are kept.
        settings: What is wanted.
        gpu: `auto` (NVML, else emulated), a name such as `nvml` or `emulated_a40`, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected.
        cache_dir: Where to keep what was measured for the next run of the same job; None: `output_dir` only.
        job: What else measurements depend on, such as the model and its precision, by name: they are used again only
            where all of it is the same.
        state: `state_dict` of an earlier run, from a checkpoint.
        num_gpus: How many ranks of this node open a GPU; None: as torchrun says, else all ranks.
        user: Who is named in messages; None is this object.
        report: Told about progress.

    Attributes:
        latest: What the last iteration took; None where that is not known.
        run: What sets the clocks and measures iterations.
        gpu_name: What was measured.

    Raises:
        ConfigurationError: If `output_dir` cannot be written, or something else sets this GPU's clocks.
        DeviceError: If the GPU cannot be opened.

    Example::

        with OptimizedRun(model.instruction_source, "outputs/run", gpu="auto") as run:
            for x, y in loader:
                train_one_batch(x, y)
        print(run.summary()["saving_percent"])
    """

    def __init__(
        self,
        source: InstructionSource,
        output_dir: str | os.PathLike[str] = "outputs/optimizer",
        *,
        settings: OptimizerSettings | None = None,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        cache_dir: str | os.PathLike[str] | None = None,
        job: Mapping[str, str] | None = None,
        state: Mapping[str, Any] | None = None,
        num_gpus: int | None = None,
        user: object = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        self.settings = settings or OptimizerSettings()
        self.output_dir = Path(output_dir)
        self.latest: IterationMeasurement | None = None
        self._source = source
        self._num_instructions = 0
        self.is_open = True
        num_gpus = ranks_on_this_node(source) if num_gpus is None else num_gpus
        check_together(source, self._check_output)
        self._guest = object()  # joins the GPU that the planned run opens
        source.add_listener(self)  # first, so that it begins before all others and ends after them
        try:
            self.run = PlannedRun(
                source,
                lambda iteration: self._states.plan_of(iteration),
                gpu=gpu,
                cluster=cluster,
                num_gpus=num_gpus,
                user=self if user is None else user,
                report=log.debug,
            )
            self._session = open_session(source, gpu, self._guest, num_gpus=num_gpus, cluster=cluster)
        except BaseException:
            source.remove_listener(self)
            raise
        self.gpu_name = self._session.gpu.name
        self._states = States(
            source,
            self._session,
            self.run,
            settings=self.settings,
            keeper=Keeper(self.output_dir, None if cache_dir is None else Path(cache_dir), state),
            output_dir=self.output_dir,
            job=job or {},
            report=report,
        )
        self._replicas = self._states.following.replicas

    def _check_output(self) -> None:
        if is_first(self._source):
            check_can_write("output_dir", self.output_dir, is_folder=True)

    # ---- events ----

    def on_iteration_begin(self, iteration: int) -> None:
        """Get ready for a pipeline that is not known yet, or has changed."""
        if self._source.schedule is not self._states.schedule:
            self._states.begin_with(self._source.schedule, iteration)
        self._num_instructions = 0
        self._session.follower.when_reached(partial(self._replicas.begin, time_of(self._session.gpu)))

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Note when the last instruction is over."""
        self._num_instructions += 1
        assert self._states.schedule is not None  # an iteration has begun
        if self._num_instructions == len(self._states.schedule.orders[self._source.rank]):
            self._session.follower.when_reached(partial(self._replicas.end, time_of(self._session.gpu)))

    def on_iteration_end(self, iteration: int) -> None:
        """Take what the iteration was, and decide about the next one."""
        self.latest = self.run.measure()
        self._states.after(iteration, self.latest)

    # ---- what is known ----

    @property
    def state(self) -> State:
        """Where it is; the same on every rank."""
        return self._states.state

    @property
    def problem(self) -> str | None:
        """Why there is no plan, if there will be none."""
        return self._states.problem

    @property
    def frontier(self) -> Frontier | None:
        """What is possible; None until it is known."""
        return self._states.frontier

    @property
    def plan(self) -> FrequencyPlan | None:
        """The plan that was chosen; None until then."""
        return self._states.following.plan

    @property
    def applied(self) -> FrequencyPlan | None:
        """The plan that this replica follows: a slower one beside a straggler; None for the top clocks."""
        return self._states.following.applied

    @property
    def verified(self) -> Verified | None:
        """What the windows have shown of the plan."""
        return self._states.trial.verified

    @property
    def notes(self) -> list[str]:
        """What has happened, in sentences."""
        return self._states.notes

    @property
    def ledger(self) -> Ledger:
        """What iterations took."""
        return self._states.ledger

    @property
    def memory(self) -> Memory:
        """What was measured."""
        return self._states.memory

    @property
    def bound_saving_percent(self) -> float | None:
        """Saving that no plan of the chosen one's iteration time exceeds, by the profile; None where not known."""
        if self.frontier is None or self.plan is None or not self.plan.lower_bound_j:
            return None
        return saving_percent(self.plan.lower_bound_j, self.frontier.baseline.iteration_energy_j)

    @property
    def net_saving_j(self) -> float:
        """Energy that the run has saved so far, J: less than as many iterations at the top clocks, all in all."""
        return self.ledger.saved_j

    def set_straggler(self, t_prime_s: float | None) -> None:
        """Say that some replica, or a job this one waits for, takes `t_prime_s` for an iteration; None: none does.

        For schedulers that know, of maintenance or of a power cap. Any rank may be told; the pipelines follow within
        `look_every` iterations.

        Raises:
            ConfigurationError: If it is no time.
        """
        self._replicas.set_straggler(t_prime_s)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps; give it to the next run as `state`."""
        return self.memory.as_dict()

    def request_top_clock(self) -> None:
        """Ask for the highest clock until the next iteration, e.g. for evaluation."""
        self.run.request_top_clock()

    def summary(self) -> dict[str, Any]:
        """What was found, as plain values: the content of `report.json` of a run without the main job."""
        frontier, plan = self.frontier, self.plan
        predicted = {}
        if frontier is not None and plan is not None:
            predicted = {
                name: {"iteration_time_s": one.iteration_time_s, "iteration_energy_j": one.iteration_energy_j}
                for name, one in (("baseline", frontier.baseline), ("plan", plan))
            }
        return {
            "device": self.gpu_name,
            "emulated": self._session.gpu.is_emulated,
            "state": self.state.value,
            "problem": self.problem,
            **(dict.fromkeys(_VERIFIED) if self.verified is None else self.verified.as_dict()),
            "lower_bound_saving_percent": self.bound_saving_percent,
            "predicted": predicted,
            "profiling_iterations": self.memory.iterations,
            "profiling_cost_j": self.memory.cost_j,
            "profiling_cost_s": self.memory.cost_s,
            "net_saving_j": self.net_saving_j,
            "notes": self.notes,
            "steps": [step.as_dict() for step in islice(self.ledger.steps, _TOLD)],
        }

    def _write_report(self) -> None:
        try:
            write_text_atomically(self.output_dir / "report.json", json.dumps(self.summary(), indent=2) + "\n")
        except OSError as error:  # the training is over, and its result is worth more
            log.warning("The report cannot be written: %s", error)

    def close(self) -> None:
        """Stop, and restore the clocks; a second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        self._source.remove_listener(self)
        self._states.close()
        if is_first(self._source):
            self._write_report()
        self.run.close()
        self._session.release(self._guest)

    def __enter__(self) -> OptimizedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
