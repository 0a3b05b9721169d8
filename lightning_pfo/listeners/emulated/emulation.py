"""Puts an emulated GPU under a pipeline rank: each instruction occupies the GPU for its modelled time."""

from __future__ import annotations

from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource, InstructionWork
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.device import EmulatedGpu, WorkScale, fit_work_scale
from lightning_pfo.device.emulated.cluster import ClusterConfig
from lightning_pfo.device.emulated.time import VirtualTime
from lightning_pfo.listeners.emulated.virtual_pipeline import VirtualPipeline


class EmulationListener(InstructionListener):
    """Drives an `EmulatedGpu` by instruction events; it is the innermost listener, so others measure what it models.

    The first iteration only counts the work of each instruction. At its end all ranks agree on the scale from counted
    work to time; `ready` is true from then on.

    Args:
        gpu: The GPU.
        source: The pipeline rank.
        cluster: How the GPUs are connected, in virtual time.
    """

    def __init__(self, gpu: EmulatedGpu, source: InstructionSource, cluster: ClusterConfig) -> None:
        self._gpu = gpu
        self._source = source
        self._cluster = cluster
        self._scale: WorkScale | None = None
        self._forwards: dict[int, InstructionWork] = {}
        self._pipeline: VirtualPipeline | None = None

    @property
    def ready(self) -> bool:
        """Whether instructions take their modelled time."""
        return self._scale is not None

    def attach(self) -> None:
        """Start listening; a collective call, as all ranks agree on the scale at the end of the first iteration."""
        time_source = self._gpu.time_source
        if isinstance(time_source, VirtualTime):
            self._pipeline = VirtualPipeline(self._gpu, time_source, self._source, self._cluster)
            self._source.add_listener(self._pipeline, outermost=True)
        self._source.count_work(True)
        self._source.add_listener(self, innermost=True)

    def detach(self) -> None:
        """Stop listening."""
        self._source.remove_listener(self)
        if self._pipeline is not None:
            self._source.remove_listener(self._pipeline)
        self._source.count_work(False)

    def on_iteration_begin(self, iteration: int) -> None:
        """From now on the GPU waits for its neighbours."""
        self._gpu.set_waiting("blocked")

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """The GPU starts computing."""
        if self._scale is not None:
            self._gpu.begin_work()

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Wait until the modelled GPU is done too."""
        assert event.work is not None
        if self._scale is not None:
            self._gpu.finish_work(*self._scale.seconds(event.work))
            if self._pipeline is not None:
                self._pipeline.finish_instruction(event)
        elif event.instruction.type is InstructionType.FORWARD:
            self._forwards[event.instruction.stage] = event.work

    def on_iteration_end(self, iteration: int) -> None:
        """The GPU has nothing to do until the next iteration."""
        if self._pipeline is not None:
            self._pipeline.finish_iteration()
        self._gpu.set_waiting("idle")
        if self._scale is None:
            by_rank = self._source.all_gather(self._forwards)
            forwards = [work for own in by_rank for work in own.values()]
            self._scale = fit_work_scale(forwards, self._gpu.config)
            if self._pipeline is not None:
                self._pipeline.begin(forwards)
