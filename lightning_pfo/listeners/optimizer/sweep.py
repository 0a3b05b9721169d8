"""Several plans of a frontier in one run: what each really takes, against what it promises.

::

    plan        17        3         29        ...     in random order, so that what drifts favours none
    iteration   w m m m   w m m m   w m m m           the first ones settle, the others are measured

The result is a CSV with a line per plan, written whole after each; a run that was cut off goes on with those that are
missing. Perseus's artifact measures a directory of plans likewise (`PointSolution`).
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionListener, InstructionSource
from lightning_pfo.core.files import PatientFiles, check_can_write, write_text_atomically
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.ranges import check_between
from lightning_pfo.core.wording import counted, cut
from lightning_pfo.listeners.agreement import check_together, is_first
from lightning_pfo.listeners.gpu_session import DEFAULT_CLUSTER, ClusterChoice, GpuChoice
from lightning_pfo.listeners.planned_run import PlannedRun
from lightning_pfo.planner.adaptive.windows import change_percent
from lightning_pfo.planner.frontier.data import Frontier
from lightning_pfo.planner.frontier.frontier_files import load_frontier

log = logging.getLogger(__name__)

COLUMNS = (
    *("plan", "predicted_time_s", "time_s", "time_error_percent"),
    *("predicted_energy_j", "energy_j", "energy_error_percent", "iterations"),
    *("time_stderr_s", "energy_stderr_j"),  # of the medians; nan of a single iteration
)
_OF_MEDIAN = 1.2533
"""By how much a median scatters more than a mean, where single values scatter normally."""


FrontierChoice = Frontier | str | os.PathLike[str]
"""A frontier, its file, or the folder of that."""


class PlanSweep(InstructionListener):
    """Trains under plans of a frontier in turn, and measures each; `close` it, or use it as a context manager.

    Args:
        source: The pipeline rank.
        frontier: The plans, or their folder.
        output: The CSV file to write, or to go on with.
        iterations: Iterations measured under each plan.
        warmup_iterations: Iterations before that, in which clocks settle.
        num_plans: Measure so many of them, drawn at random; None: all.
        seed: Of the order.
        gpu: `auto`, a name, a `GpuConfig`, or a `Gpu`.
        cluster: How emulated GPUs are connected.
        num_gpus: How many ranks of this node open a GPU; None: as torchrun says, else all ranks.
        user: Who is named in messages; None is this object.
        report: Told about progress.

    Attributes:
        rows: What was measured so far, by plan number (0 is the slowest, as in `frontier.csv`).

    Raises:
        ConfigurationError: If a number is out of range, or the file is of another frontier or cannot be written.
        PlanError: If the frontier cannot be read.

    Example::

        with PlanSweep(model.instruction_source, "plans", "measured.csv", iterations=10) as sweep:
            while not sweep.done:
                train_one_batch()
    """

    def __init__(
        self,
        source: InstructionSource,
        frontier: FrontierChoice,
        output: str | os.PathLike[str],
        *,
        iterations: int = 5,
        warmup_iterations: int = 1,
        num_plans: int | None = None,
        seed: int = 0,
        gpu: GpuChoice = "auto",
        cluster: ClusterChoice = DEFAULT_CLUSTER,
        num_gpus: int | None = None,
        user: object = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        check_between("iterations", iterations, 1)
        check_between("warmup_iterations", warmup_iterations, 0)
        self._frontier = frontier if isinstance(frontier, Frontier) else load_frontier(frontier)
        plans = self._frontier.plans
        if num_plans is not None:
            check_between("num_plans", num_plans, 1, len(plans))
        self._output, self._source, self._report = Path(output), source, report
        self._files = PatientFiles()
        self._iterations, self._warmup = iterations, warmup_iterations
        self.rows: dict[int, dict[str, float]] = {}
        check_together(source, self._take_up)
        self.rows = next(iter(source.all_gather(self.rows, everywhere=True)))  # those of the first rank
        chosen = random.Random(seed).sample(range(len(plans)), num_plans or len(plans))
        self._waiting = [number for number in chosen if number not in self.rows]
        if self.rows:
            report(f"{counted(len(self.rows), 'plan')} of {self._output} are measured already.")
        self._begun: dict[int, tuple[int, int]] = {}  # plan and number of the iteration under it, by iteration
        self._num_under_plan = 0
        self._seen: list[tuple[float, float]] = []
        self.is_open = True
        source.add_listener(self)  # first: it ends after the one that measures
        try:
            self._run = PlannedRun(
                source, self._plan_of, gpu=gpu, cluster=cluster, num_gpus=num_gpus, user=user or self, report=log.debug
            )
        except BaseException:
            source.remove_listener(self)
            raise

    @property
    def done(self) -> bool:
        """Whether all plans are measured; the same on every rank."""
        return not self._waiting

    def _plan(self, number: int) -> FrequencyPlan:
        return self._frontier.plans[len(self._frontier.plans) - 1 - number]

    def _plan_of(self, iteration: int) -> FrequencyPlan | None:
        if self.done:
            return None
        self._begun[iteration] = self._waiting[0], self._num_under_plan
        self._num_under_plan += 1
        return self._plan(self._waiting[0])

    def on_iteration_end(self, iteration: int) -> None:
        """Take what was measured last: on CUDA that is the iteration before."""
        measured = self._run.measure()
        if measured is None:  # emulated work is being counted
            self._num_under_plan = 0
        if measured is None or self.done:
            return
        number, count = self._begun.pop(measured.iteration, (-1, 0))
        if number != self._waiting[0] or count < self._warmup:
            return
        self._seen.append((measured.time_s, measured.energy_j))
        if len(self._seen) == self._iterations:
            self._finish(number)

    def _finish(self, number: int) -> None:
        plan = self._plan(number)
        columns = list(zip(*self._seen, strict=True))
        (time_s, energy_j), stderrs = map(statistics.median, columns), map(_stderr_of_median, columns)
        values = (
            number,
            *(plan.iteration_time_s, time_s, change_percent(time_s, plan.iteration_time_s)),
            *(plan.iteration_energy_j, energy_j, change_percent(energy_j, plan.iteration_energy_j)),
            len(self._seen),
            *stderrs,
        )
        self.rows[number] = dict(zip(COLUMNS, values, strict=True))
        self._waiting.pop(0)
        self._seen, self._num_under_plan = [], 0
        if is_first(self._source):
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows[one] for one in sorted(self.rows))
            self._files.write(self._output, partial(write_text_atomically, self._output, text.getvalue()))
        self._report(
            f"plan {number}: {time_s:.4g} s ({values[3]:+.2f} % of what it promises) and {energy_j:.5g} J "
            f"({values[6]:+.2f} %); {len(self._waiting)} to go."
        )

    def _take_up(self) -> None:
        """Read what an earlier run has measured."""
        if not is_first(self._source):
            return
        check_can_write("output", self._output)
        if not self._output.exists():
            return
        try:
            with self._output.open(newline="", encoding="utf-8") as file:
                for row in csv.DictReader(file):
                    values = {name: float(row.get(name) or math.nan) for name in COLUMNS}
                    if any(math.isnan(values[name]) for name in COLUMNS[:-2]):
                        raise ValueError(f"{row} lacks figures")
                    number = int(values["plan"])
                    promised = self._plan(number) if 0 <= number < len(self._frontier.plans) else None
                    if promised is None or abs(promised.iteration_time_s - values["predicted_time_s"]) > 1e-9:
                        raise ValueError(f"plan {number} is of another frontier")
                    self.rows[number] = values | {"plan": number, "iterations": int(values["iterations"])}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"A sweep goes on with what it has measured of the same frontier; {self._output} is something else "
                f"({cut(str(error))}). Give another output."
            ) from error

    def close(self) -> None:
        """Stop and restore the clocks; a second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._source.remove_listener(self)
            self._files.try_again()
            self._run.close()

    def __enter__(self) -> PlanSweep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _stderr_of_median(values: Sequence[float]) -> float:
    return _OF_MEDIAN * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
