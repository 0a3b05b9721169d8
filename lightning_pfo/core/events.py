"""Instruction events: what a running pipeline tells its listeners.

One training iteration, as a listener of one rank sees it (waiting for neighbours happens between instructions)::

    on_iteration_begin   on_instruction_begin/_end ... begin/_end   on_iteration_end
           |  blocked  |       0F0       | blocked |    0F1    | ... |

Begin events are delivered in the order of registration and end events in reverse, so that listeners nest like
context managers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from lightning_pfo.core.instruction import Instruction
from lightning_pfo.core.schedules.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True)
class InstructionWork:
    """How much an instruction does.

    Attributes:
        flops: Floating-point operations.
        bytes: Bytes read or written.
        sent_bytes: Bytes that it computes for a neighbouring stage.
    """

    flops: float
    bytes: float
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class InstructionEvent:
    """Begin or end of one instruction.

    Attributes:
        instruction: What begins or ends.
        iteration: Number of pipeline iterations run before this one (training iterations only).
        work: At the end of an instruction, its counted work; None unless `count_work` was asked of the source.
    """

    instruction: Instruction
    iteration: int
    work: InstructionWork | None = None


class InstructionListener:
    """Base class of listeners; every method does nothing. Called on the training thread, so be quick."""

    def on_iteration_begin(self, iteration: int) -> None:
        """A training iteration starts on this rank; the rank waits until its first instruction."""

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """The inputs of an instruction are there; it starts now."""

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """An instruction is over; the rank waits until the next one begins."""

    def on_iteration_end(self, iteration: int) -> None:
        """All ranks have finished the iteration."""


class InstructionSource(Protocol):
    """A running pipeline rank, as listeners and callbacks know it."""

    @property
    def rank(self) -> int:
        """Rank of this process within the pipeline."""

    @property
    def place(self) -> tuple[int, int]:
        """Which replica of the pipeline this process is in, and which part of its layers it has."""

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that run on this rank."""

    @property
    def local_device_index(self) -> int:
        """Number of this process on its node; also that of its GPU, unless torch was told to use another one."""

    @property
    def schedule(self) -> PipelineSchedule | None:
        """The executed order; None until the number of microbatches is known (at the first batch at the latest)."""

    @property
    def microbatch(self) -> str:
        """Types and shapes of the tensors in the first microbatch that was run; empty until then, or if not known."""

    def add_listener(self, listener: InstructionListener, *, innermost: bool = False, outermost: bool = False) -> None:
        """Deliver events to `listener`; an innermost one is nested inside all others, an outermost one around them."""

    def remove_listener(self, listener: InstructionListener) -> None:
        """Stop delivering events to `listener`."""

    def count_work(self, enabled: bool) -> None:
        """Count the work of instructions and attach it to their end events (counted once per kind and stage)."""

    def synchronize(self) -> None:
        """Wait until the device has finished what was launched."""

    def all_gather(self, value: Any, *, everywhere: bool = False) -> list[Any]:
        """Exchange a small picklable value with all pipeline ranks, or with those of all places; a collective call."""

    def host_group(self, *, everywhere: bool = False) -> Any:
        """The process group of these ranks in which hosts talk to each other, none waiting for its device.

        A `torch.distributed` group, None for the world; the first call is a collective one.
        """


class EventEmitter:
    """Keeps the listeners of a source and delivers events to them."""

    def __init__(self) -> None:
        self._outermost: list[InstructionListener] = []
        self._between: list[InstructionListener] = []
        self._innermost: list[InstructionListener] = []
        self._begin: tuple[InstructionListener, ...] = ()
        self._end: tuple[InstructionListener, ...] = ()

    def __bool__(self) -> bool:
        """Whether anybody listens."""
        return bool(self._begin)

    def add(self, listener: InstructionListener, *, innermost: bool = False, outermost: bool = False) -> None:
        """Register a listener; see `InstructionSource.add_listener`."""
        (self._outermost if outermost else self._innermost if innermost else self._between).append(listener)
        self._refresh()

    def remove(self, listener: InstructionListener) -> None:
        """Remove a listener; a listener that is not registered is ignored."""
        for listeners in (self._outermost, self._between, self._innermost):
            listeners[:] = [known for known in listeners if known is not listener]
        self._refresh()

    def _refresh(self) -> None:
        self._begin = (*self._outermost, *self._between, *self._innermost)
        self._end = self._begin[::-1]

    def iteration_begin(self, iteration: int) -> None:
        """Tell all listeners that an iteration begins."""
        for listener in self._begin:
            listener.on_iteration_begin(iteration)

    def instruction_begin(self, event: InstructionEvent) -> None:
        """Tell all listeners that an instruction begins."""
        for listener in self._begin:
            listener.on_instruction_begin(event)

    def instruction_end(self, event: InstructionEvent) -> None:
        """Tell all listeners that an instruction is over."""
        for listener in self._end:
            listener.on_instruction_end(event)

    def iteration_end(self, iteration: int) -> None:
        """Tell all listeners that an iteration is over."""
        for listener in self._end:
            listener.on_iteration_end(iteration)
