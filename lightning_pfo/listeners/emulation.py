"""Puts an emulated GPU under a pipeline rank: each instruction occupies the GPU for its modelled time."""

from __future__ import annotations

from lightning_pfo.core.events import InstructionEvent, InstructionListener, InstructionSource, InstructionWork
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.device import EmulatedGpu, WorkScale, fit_work_scale


class EmulationListener(InstructionListener):
    """Drives an `EmulatedGpu` by instruction events; attach it innermost, so that others measure what it models.

    The first iteration only counts the work of each instruction. At its end all ranks agree on the scale from counted
    work to time; `ready` is true from then on.
    """

    def __init__(self, gpu: EmulatedGpu, source: InstructionSource) -> None:
        self._gpu = gpu
        self._source = source
        self._scale: WorkScale | None = None
        self._forwards: dict[int, InstructionWork] = {}

    @property
    def ready(self) -> bool:
        """Whether instructions take their modelled time."""
        return self._scale is not None

    def attach(self) -> None:
        """Start listening; a collective decision, as all ranks agree on the scale at the end of the first iteration."""
        self._source.count_work(True)
        self._source.add_listener(self, innermost=True)

    def detach(self) -> None:
        """Stop listening."""
        self._source.remove_listener(self)
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
        elif event.instruction.type is InstructionType.FORWARD:
            self._forwards[event.instruction.stage] = event.work

    def on_iteration_end(self, iteration: int) -> None:
        """The GPU has nothing to do until the next iteration."""
        self._gpu.set_waiting("idle")
        if self._scale is None:
            by_rank = self._source.all_gather(self._forwards)
            self._scale = fit_work_scale([work for own in by_rank for work in own.values()], self._gpu.config)
