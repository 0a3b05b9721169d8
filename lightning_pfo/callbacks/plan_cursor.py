"""Sets the clock of each instruction as a plan says."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pfo.core.events import InstructionEvent, InstructionListener
from lightning_pfo.core.frequency_plan import FrequencyPlan
from lightning_pfo.core.instruction import Instruction


class PlanCursor(InstructionListener):
    """Requests the clock of the next instruction as soon as the present one ends.

    A requested clock lands milliseconds later; so asked for, it lands while the GPU waits for its neighbour wherever
    there is a wait, instead of in the middle of the instruction.

    Args:
        plan: The plan to apply.
        rank: This process's rank in the pipeline.
        request: Asks for a clock in MHz without blocking.
    """

    def __init__(self, plan: FrequencyPlan, rank: int, request: Callable[[int], None]) -> None:
        order, row = plan.schedule.orders[rank], plan.clocks_mhz[rank]
        self._first_mhz = row[0]
        following = (*row[1:], row[0])  # after the last instruction comes the next iteration
        self._next_mhz: dict[Instruction, int] = dict(zip(order, following, strict=True))
        self._request = request

    def on_iteration_begin(self, iteration: int) -> None:
        """Ask for the first instruction's clock."""
        self._request(self._first_mhz)

    def on_instruction_end(self, event: InstructionEvent) -> None:
        """Ask for the next instruction's clock."""
        self._request(self._next_mhz[event.instruction])
