"""Something that happens at a moment of virtual time, while the test lets it pass."""

from __future__ import annotations

from collections.abc import Callable

from lightning_pfo.device.time import Process, TimeSource


def later(time_source: TimeSource, delay_s: float, action: Callable[[], object]) -> None:
    """Do something so many seconds from now."""

    def wait_and_act() -> Process[None]:
        yield delay_s
        action()

    time_source.spawn(wait_and_act(), "later")
