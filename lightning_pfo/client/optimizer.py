"""What a training loop calls: a plan from the server, followed on this rank's GPU."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

from lightning_pfo.client.answers import ReceivedPlan, job_name
from lightning_pfo.client.cursor import RowCursor
from lightning_pfo.client.loop_source import LoopSource
from lightning_pfo.client.plan_follower import PlanFollower
from lightning_pfo.client.reports import PlanMeasurement
from lightning_pfo.client.server_link import ServerAwayError, ServerLink, ServerRefusalError, quoted
from lightning_pfo.core.errors import ConfigurationError, DeviceError, PfoError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.ranges import check_between, check_whole
from lightning_pfo.listeners.agreement import first_problem, is_first
from lightning_pfo.listeners.clock_requests import ClockRequests
from lightning_pfo.listeners.gpu_session import GpuChoice, GpuSession, open_session

logger = logging.getLogger(__name__)

_TIMEOUT_S, _TRIES = 20.0, 3
_NO_EMULATED = "An emulated GPU needs to know the work of instructions, which a foreign loop does not tell."


class PipelineFrequencyOptimizer:
    """Follows the server's plan in any pipeline loop; call its methods where Zeus's are called.

    Making one is a collective call of all ranks, after `init_process_group`. Whatever happens to the server or the
    clocks later, training goes on: under the last plan, or at the GPU's own clocks.

    Args:
        rank: Global rank of this process.
        dp_rank: Its replica.
        pp_rank: Its place in the pipeline.
        tp_rank: Its part of the layers.
        device_id: CUDA's number of its GPU.
        dp_degree: Replicas.
        pp_degree: Ranks of a pipeline.
        tp_degree: Parts of the layers.
        world_size: Ranks in all.
        server_url: Such as `http://127.0.0.1:7787`.
        job_metadata: Words that become part of the job's name on the server.
        gpu: How the GPU is controlled: `nvml`, `zeus`, a configuration, or an open GPU; not an emulated one.
        token_file: File with the server's token.
        cafile: Certificates to trust for https.
        first_plan_s: Wait so long for the first plan; without it training begins at the GPU's own clocks.
        measured_steps: Steps that are measured under each plan of a scan, and once under the plan, at least.

    Attributes:
        job_id: The job's name on the server; None if no server took it.
        plan: The plan of this step.

    Raises:
        ConfigurationError: On every rank, if an argument cannot be used.
        PfoError: On every rank, if the server refuses the job or a rank; an absent server is no error.

    Example::

        optimizer = PipelineFrequencyOptimizer(rank, 0, rank, 0, local_rank, 1, 4, 1, 4, "http://127.0.0.1:7787")
        for batch in loader:
            optimizer.on_step_begin()
            schedule.step(batch)  # calls on_instruction_begin/end("forward" or "backward") around each microbatch
            optimizer.on_step_end()
        optimizer.close()
    """

    def __init__(
        self,
        rank: int,
        dp_rank: int,
        pp_rank: int,
        tp_rank: int,
        device_id: int,
        dp_degree: int,
        pp_degree: int,
        tp_degree: int,
        world_size: int,
        server_url: str,
        job_metadata: str | None = None,
        *,
        gpu: GpuChoice = "nvml",
        token_file: str | None = None,
        cafile: str | None = None,
        first_plan_s: float = 60.0,
        measured_steps: int = 5,
    ) -> None:
        check_between("first_plan_s", first_plan_s, 0.0)
        check_whole("measured_steps", measured_steps, 1, 1_000)
        self._rank, self._measured_steps = rank, measured_steps
        self._source = LoopSource(
            pp_rank, dp_rank, tp_rank, device_id=device_id, world_size=world_size, pp_degree=pp_degree
        )
        self.plan = ReceivedPlan()
        self._step = 0
        self._is_in_step = self._is_closed = False
        self._follower: PlanFollower | None = None
        self._measurement: PlanMeasurement | None = None
        self._instruction = InstructionType.FORWARD
        link = self._together(lambda: ServerLink(server_url, token_file=token_file, cafile=cafile))
        assert link is not None  # only an error that all raise leaves none
        degrees = {"dp_degree": dp_degree, "pp_degree": pp_degree, "tp_degree": tp_degree, "world_size": world_size}
        self.job_id = self._register_job(link, {**degrees, "job_metadata": job_metadata})
        self._session = self._open(gpu, device_id)
        clocks_mhz = () if self._session is None else self._session.gpu.supported_clocks_mhz()
        self._cursor = RowCursor(self._request, max(clocks_mhz, default=0))
        self._requests: ClockRequests | None = None
        if self._session is not None:
            self._requests = ClockRequests(self._session.clocks, self._session.follower)
        try:
            places = {"rank": rank, "dp_rank": dp_rank, "pp_rank": pp_rank, "tp_rank": tp_rank}
            self._together(lambda: self._register_rank(link, {**places, "available_frequencies": clocks_mhz}))
            if self.job_id is not None:
                follower = PlanFollower(link, self.job_id, rank)
                self._together(lambda: follower.wait_for_first(first_plan_s))
                self._follower = follower
                follower.start()
        except BaseException:
            self.close()
            raise

    # What the loop calls; Zeus's names.

    def on_train_begin(self) -> None:
        """Nothing is to be done."""

    def on_train_end(self) -> None:
        """The training is over: clocks are restored."""
        self.close()

    def on_epoch_begin(self) -> None:
        """Nothing is to be done."""

    def on_epoch_end(self) -> None:
        """Nothing is to be done."""

    def on_evaluate(self, metric: float) -> None:
        """Nothing is to be done."""

    def on_step_begin(self) -> None:
        """A step begins: from here on it has the plan that is due."""
        if self._is_closed:
            return
        self._is_in_step = True
        if self._follower is not None:
            self._follower.at_step(self._step)
            due = self._follower.plan_at(self._step)
            if due.version > self.plan.version:
                self._adopt(due)
        self._cursor.begin(self.plan.row)
        self._source.begin_iteration(self._step)

    def on_step_end(self) -> None:
        """A step is over."""
        if self._is_closed:
            return
        if self._is_in_step:
            self._source.end_iteration()
        self._is_in_step = False
        self._step += 1
        if self._measurement is not None and self._follower is not None:
            report = self._measurement.step_is_over(self._cursor.is_complete)
            if report is not None:
                self._follower.report(report)
                self._stop_measuring()

    def on_instruction_begin(self, name: str) -> None:
        """An instruction begins: `forward` or `backward`, or another one that the plan has."""
        if self._is_closed:
            return
        if not self._is_in_step:
            self.on_step_begin()  # loops written for Zeus need not say it
        self._cursor.begin_instruction(name)
        kind = _KINDS.get(name)
        if kind is not None:
            self._source.begin_instruction(kind)

    def on_instruction_end(self, name: str) -> None:
        """An instruction is over: the clock of the next one is asked for when the GPU gets there."""
        if self._is_closed:
            return
        kind = _KINDS.get(name)
        if kind is not None:
            self._source.end_instruction(kind)
        self._cursor.end_instruction()

    def close(self) -> None:
        """Restore the clocks and leave the server alone. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._follower is not None:
            self._follower.close()
        self._stop_measuring()
        if self._session is not None:
            self._session.release(self)

    # How it comes about.

    def _adopt(self, plan: ReceivedPlan) -> None:
        self._stop_measuring()
        if is_first(self._source):
            logger.info("From step %d on, plan %d: %s.", self._step, plan.version, plan.label)
        if self._session is not None and self._session.clocks.error is None:
            self._measurement = PlanMeasurement(plan, self._rank, self._session.gpu, self._source, self._measured_steps)
        self.plan = plan

    def _stop_measuring(self) -> None:
        if self._measurement is not None:
            self._measurement.close()
            self._measurement = None

    def _request(self, clock_mhz: int) -> None:
        if self._requests is not None:
            self._requests.request(clock_mhz)

    def _register_job(self, link: ServerLink, body: dict[str, Any]) -> str | None:
        """Rank 0 registers the job; all learn its name, or why there is none."""
        job_id: str | None = None

        def register() -> None:
            nonlocal job_id
            if self._rank == 0:
                job_id = job_name(_tried(link, "/register_job", {**body, "request_id": uuid.uuid4().hex}))

        self._together(register)
        return next((name for name in self._source.all_gather(job_id, everywhere=True) if name is not None), None)

    def _register_rank(self, link: ServerLink, body: dict[str, Any]) -> None:
        if self.job_id is not None:
            _tried(link, f"/register_rank/{quoted(self.job_id)}", body)

    def _open(self, choice: GpuChoice, device_id: int) -> GpuSession | None:
        """The GPU, if all ranks have theirs; a collective call."""
        session: GpuSession | None = None
        problem: PfoError | None = None
        try:
            num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE", device_id + 1))
            session = open_session(self._source, choice, self, num_gpus=num_gpus)
            if session.gpu.is_emulated:
                raise ConfigurationError(f"{_NO_EMULATED} Use gpu=nvml.")
        except PfoError as error:
            problem = error
        found = first_problem(self._source, problem)
        if found is None:
            assert session is not None
            session.own_clocks(self)
            return session
        if session is not None:
            session.release(self)
        if not isinstance(found[1], DeviceError):
            raise found[1]
        if is_first(self._source):
            logger.warning("Training goes on at the GPUs' own clocks, as %s meets: %s (%s)", *found, _NO_EMULATED)
        return None

    def _together(self, act: Any) -> Any:
        """Do something on every rank; a refusal on one of them is raised by all, an absent server by none."""
        problem: PfoError | None = None
        result = None
        try:
            result = act()
        except ServerAwayError as error:
            logger.warning("Training goes on without the server. %s", error)
        except PfoError as error:
            problem = error
        found = first_problem(self._source, problem)
        if found is not None:
            raise found[1]
        return result


_KINDS = {kind.profile_name: kind for kind in InstructionType}


def _tried(link: ServerLink, path: str, body: dict[str, Any]) -> Any:
    """Send it, again if the server does not answer: it takes repeated registrations for one."""
    for left in reversed(range(_TRIES)):
        try:
            return link.post(path, body, timeout_s=_TIMEOUT_S).content
        except ServerAwayError:
            if not left:
                raise
    return None


__all__ = ["PipelineFrequencyOptimizer", "ServerRefusalError"]
