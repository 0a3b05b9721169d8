"""Sets the clock of each instruction as a plan says, and those of its long waits."""

from __future__ import annotations

from typing import Protocol

from lightning_pfo.core.events import InstructionEvent, InstructionListener
from lightning_pfo.core.frequency_plan import FrequencyPlan


class Requests(Protocol):
    """What is asked of `ClockRequests`; nothing blocks."""

    def request(self, clock_mhz: int) -> None:
        """Ask for a clock in MHz."""

    def request_after(self, clock_mhz: int, delay_s: float) -> None:
        """Ask for a clock after some time, unless another one is asked for meanwhile."""


class PlanCursor(InstructionListener):
    """Requests the clock of the next instruction as soon as the present one ends.

    A requested clock lands milliseconds later; so asked for, it lands while the GPU waits for its neighbour wherever
    there is a wait, instead of in the middle of the instruction. Where the plan has a clock for the wait, that one is
    requested, and the instruction's when the plan says, or when the instruction begins if that is sooner.

    Args:
        plan: The plan to apply.
        rank: This process's rank in the pipeline.
        requests: Where clocks are asked for.
    """

    def __init__(self, plan: FrequencyPlan, rank: int, requests: Requests) -> None:
        order, row = plan.schedule.orders[rank], plan.clocks_mhz[rank]
        self._clocks_mhz = (*row, row[0])  # after the last instruction comes the next iteration
        self._position = {instruction: position for position, instruction in enumerate(order)}
        self._waits = {wait.position: wait for wait in plan.wait_clocks if wait.rank == rank}
        self._requests = requests

    def on_iteration_begin(self, iteration: int) -> None:
        """Ask for the clock of the first wait, or of the first instruction."""
        self._wait_for(0)

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """End a wait that was shorter than planned."""
        position = self._position[event.instruction]
        if position in self._waits:
            self._requests.request(self._clocks_mhz[position])

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Ask for the clock of the wait that begins, or of the next instruction."""
        self._wait_for(self._position[event.instruction] + 1)

    def on_iteration_end(self, iteration: int) -> None:
        """End the last wait: what follows, such as the optimizer's step, is not for a low clock."""
        if len(self._position) in self._waits:
            self._requests.request(self._clocks_mhz[-1])

    def _wait_for(self, position: int) -> None:
        wait = self._waits.get(position)
        if wait is None:
            self._requests.request(self._clocks_mhz[position])
        elif position == len(self._position):
            self._requests.request(wait.clock_mhz)
        else:
            self._requests.request(wait.clock_mhz)
            self._requests.request_after(self._clocks_mhz[position], wait.hold_s)
