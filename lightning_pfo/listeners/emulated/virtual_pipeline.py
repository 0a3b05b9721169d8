"""Virtual time of a whole pipeline: each rank's time follows those that it waits for.

::

    rank 0   |==F0==|==F1==|            blocked             |==B0==|        latest of all ranks and replicas |
                     ~transfer~|                     ~~~~~~|
    rank 1     blocked         |==F0==|==B0==|==F1==|                                                        |

An instruction begins when its rank is free and its inputs have arrived, on the modelled links of a cluster. Ranks that
share layers (tensor parallelism) end each instruction together. The iteration ends for all when the last rank is done;
after it, replicas add up gradients, the optimizer steps and the next batch is fetched.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource, InstructionWork
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.p2p import Transfer, transfers
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.device import EmulatedGpu
from lightning_pfo.device.emulated.cluster import ClusterConfig
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.listeners.emulated.moments import Moments

_TENSOR_TAG = 1
_FIRST_TRANSFER_TAG = 2


class VirtualPipeline(InstructionListener):
    """Lets the virtual time of this rank's GPU pass while it waits; attach it outermost, so that all others see it.

    Args:
        gpu: This rank's GPU.
        time_source: Its time.
        source: The pipeline rank.
        cluster: How the GPUs are connected.
    """

    def __init__(
        self, gpu: EmulatedGpu, time_source: VirtualTime, source: InstructionSource, cluster: ClusterConfig
    ) -> None:
        """Find out who is who; a collective call."""
        self._gpu, self._time, self._source, self._cluster = gpu, time_source, source, cluster
        everybody = source.all_gather((source.rank, source.place), everywhere=True)
        dp_rank, tp_rank = source.place
        self._own = everybody.index((source.rank, source.place))
        self._number_of = {rank: number for number, (rank, place) in enumerate(everybody) if place == source.place}
        same_rank = [(number, *place) for number, (rank, place) in enumerate(everybody) if rank == source.rank]
        self._sharing = [number for number, dp, tp in same_rank if dp == dp_rank and tp != tp_rank]
        replicas = [number for number, dp, tp in same_rank if tp == tp_rank]
        self._all_reduce_s = cluster.all_reduce_s(replicas)
        self._moments = Moments(source, len(everybody))
        self._schedule: PipelineSchedule | None = None
        self._incoming: dict[Instruction, tuple[int, int]] = {}  # who sends its input, and under which tag
        self._outgoing: dict[Instruction, tuple[int, int]] = {}
        self._byte_scale: float | None = None
        self._is_first = True

    def begin(self, forwards: Iterable[InstructionWork]) -> None:
        """Let time pass from the next iteration on; all ranks call it with the same forwards of all stages."""
        largest = max((work.sent_bytes for work in forwards), default=0.0)
        self._byte_scale = self._cluster.activation_mb * 1e6 / largest if largest else 0.0

    def on_iteration_begin(self, iteration: int) -> None:
        """Pass the time between iterations."""
        if self._byte_scale is None:
            return
        if self._schedule is not self._source.schedule:
            assert self._source.schedule is not None  # an iteration has begun
            self._use(self._source.schedule)
        if not self._is_first:
            self._gpu.set_waiting("blocked")
            self._sleep(self._all_reduce_s)
            self._gpu.set_waiting("idle")
            self._sleep(self._cluster.optimizer_s + self._cluster.data_s)
        self._is_first = False

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """Wait until its input has arrived."""
        if self._byte_scale is not None and event.instruction in self._incoming:
            self._time.sleep_until(self._moments.receive(*self._incoming[event.instruction]))

    def finish_instruction(self, event: InstructionEvent) -> None:
        """End an instruction with those who share it, and send what it has computed."""
        assert event.work is not None
        assert self._byte_scale is not None
        for number in self._sharing:
            self._moments.send(self._time.now_s(), number, _TENSOR_TAG)
        for moment_s in [self._moments.receive(number, _TENSOR_TAG) for number in self._sharing]:
            self._time.sleep_until(moment_s)
        if event.instruction in self._outgoing:
            to, tag = self._outgoing[event.instruction]
            transfer_s = self._cluster.transfer_s(self._byte_scale * event.work.sent_bytes, self._own, to)
            self._moments.send(self._time.now_s() + self._scaled(transfer_s), to, tag)

    def finish_iteration(self) -> None:
        """Wait for the last of all processes."""
        if self._byte_scale is not None:
            self._time.sleep_until(self._moments.latest(self._time.now_s()))

    def _use(self, schedule: PipelineSchedule) -> None:
        self._schedule = schedule
        tagged: list[tuple[int, Transfer]] = list(enumerate(transfers(schedule), _FIRST_TRANSFER_TAG))
        rank, number_of = self._source.rank, self._number_of
        self._incoming = {t.consumer: (number_of[t.source], tag) for tag, t in tagged if t.destination == rank}
        self._outgoing = {t.producer: (number_of[t.destination], tag) for tag, t in tagged if t.source == rank}

    def _scaled(self, duration_s: float) -> float:
        return duration_s * self._gpu.config.time_scale

    def _sleep(self, duration_s: float) -> None:
        self._time.sleep(self._scaled(duration_s))
