"""Ask for the clocks of a plan in time: when the GPU has finished an instruction, or earlier by the latency.

::

    instructions       | ... F0 ... |   | ... B0 ... | ... F1 ...
    asked at the end                ^~~~~|           ^~~~~|             F1 begins at the clock of B0
    led by the latency              ^~~~~|      ^~~~~|                  no wait before F1: asked while B0 runs
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from lightning_pfo.core.events import InstructionEvent, InstructionListener
from lightning_pfo.core.instruction import Instruction
from lightning_pfo.device.time import HOST_TIME, TimeSource
from lightning_pfo.listeners.device_follower import DeviceFollower

_MEMORY = 0.5  # weight of earlier iterations in expected durations


class Clocks(Protocol):
    """What is asked of `ClockController`."""

    @property
    def usual_latency_s(self) -> float:
        """Time from a request until its clock is there; 0 while unknown."""

    def request(self, clock_mhz: int) -> None:
        """Ask for a clock now."""

    def request_at(self, clock_mhz: int, due_s: float) -> None:
        """Ask for a clock from a moment of the GPU's time on, unless another request comes before it."""


class ClockRequests(InstructionListener):
    """Passes requests on to the clocks when the device gets to the place where they were made.

    With `leads`, the request that followed an instruction in the last iteration is made before the instruction ends, so
    that its clock is there when the next one begins. Where the wait in between is longer than the latency there is
    nothing to lead; and an instruction that ends earlier than expected has its request made at once.

    Args:
        clocks: Where requests go.
        follower: Knows when the device gets somewhere.
        leads: Whether to lead by `clocks.usual_latency_s`.
        time_source: The GPU's time.
    """

    def __init__(
        self, clocks: Clocks, follower: DeviceFollower, *, leads: bool = False, time_source: TimeSource = HOST_TIME
    ) -> None:
        self._clocks = clocks
        self._follower = follower
        self._leads = leads
        self._time = time_source
        self._last_mhz: int | None = None
        self._launched: Instruction | None = None  # by the training thread
        # Everything below belongs to the thread of the follower.
        self._followed_by_mhz: dict[Instruction, int] = {}
        self._duration_s: dict[Instruction, float] = {}
        self._wait_s: dict[Instruction, float] = {}  # after the instruction
        self._running: tuple[Instruction, float] | None = None
        self._finished: tuple[Instruction, float] | None = None

    def request(self, clock_mhz: int) -> None:
        """Ask for a clock when the device has done what was launched so far. A repeated value costs nothing."""
        if self._leads:
            self._follower.when_reached(partial(self._reached_end, self._launched, clock_mhz))
        elif clock_mhz != self._last_mhz:
            self._follower.when_reached(partial(self._clocks.request, clock_mhz))
        self._launched, self._last_mhz = None, clock_mhz

    def request_after(self, clock_mhz: int, delay_s: float) -> None:
        """Ask for a clock some time after the device has done what was launched so far, unless another is asked for."""
        self._follower.when_reached(partial(self._reached_wait, clock_mhz, delay_s))
        self._last_mhz = None

    def _reached_wait(self, clock_mhz: int, delay_s: float) -> None:
        self._clocks.request_at(clock_mhz, self._time.now_s() + delay_s)

    def on_instruction_begin(self, event: InstructionEvent) -> None:
        """Learn when instructions run, and ask ahead."""
        if self._leads:
            self._launched = event.instruction
            self._follower.when_reached(partial(self._reached_begin, event.instruction))

    def _reached_begin(self, instruction: Instruction) -> None:
        now_s = self._time.now_s()
        if self._finished is not None:
            previous, end_s = self._finished
            self._learn(self._wait_s, previous, now_s - end_s)
        self._running, self._finished = (instruction, now_s), None
        lead_s = self._clocks.usual_latency_s - self._wait_s.get(instruction, 0.0)
        if lead_s > 0 and instruction in self._duration_s:
            self._clocks.request_at(self._followed_by_mhz[instruction], now_s + self._duration_s[instruction] - lead_s)

    def _reached_end(self, instruction: Instruction | None, clock_mhz: int) -> None:
        self._clocks.request(clock_mhz)
        if instruction is not None and self._running is not None:
            now_s = self._time.now_s()
            self._learn(self._duration_s, instruction, now_s - self._running[1])
            self._followed_by_mhz[instruction] = clock_mhz
            self._running, self._finished = None, (instruction, now_s)

    def _learn(self, known_s: dict[Instruction, float], instruction: Instruction, seen_s: float) -> None:
        known_s[instruction] = _MEMORY * known_s.get(instruction, seen_s) + (1 - _MEMORY) * seen_s
