"""From counted work to seconds on the emulated GPU, so that a small model on a CPU looks like a large one on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.events import InstructionWork
from lightning_pfo.device.config import GpuConfig

_LEAST_S = 1e-6  # what has nothing to compute, such as input gradients of the first stage, is launched all the same


@dataclass(frozen=True)
class WorkScale:
    """Factors from counted work to time at the top clock.

    Attributes:
        seconds_per_flop: Time of a floating-point operation; it scales with the graphics clock.
        seconds_per_byte: Time of a byte read or written; it does not.
    """

    seconds_per_flop: float
    seconds_per_byte: float

    def seconds(self, work: InstructionWork) -> tuple[float, float]:
        """Return (compute_s, memory_s) of an instruction at the top clock; no instruction takes less than 1 us."""
        compute_s, memory_s = work.flops * self.seconds_per_flop, work.bytes * self.seconds_per_byte
        return compute_s, max(memory_s, _LEAST_S - compute_s)


def fit_work_scale(forwards: Iterable[InstructionWork], config: GpuConfig) -> WorkScale:
    """Choose the factors such that the longest forward takes `config.forward_s` at the top clock.

    `config.memory_share` of the time of the forward with the most operations is memory time. All ranks must pass the
    same forwards, or their GPUs would differ. With `config.work_scale` that forward takes `flops * work_scale` instead.

    Args:
        forwards: The work of one microbatch's forward of every stage.
        config: Where `forward_s`, `memory_share` and `work_scale` come from.

    Raises:
        ConfigurationError: If no forward has floating-point operations.
    """
    forwards = list(forwards)
    reference = max(forwards, key=lambda work: work.flops, default=InstructionWork(0, 0))
    if reference.flops <= 0:
        raise ConfigurationError(
            f"The emulated GPU derives times from counted work, so at least one stage's forward must have "
            f"floating-point operations; got {forwards}. Pipeline a module with matrix products or convolutions."
        )
    memory_share = config.memory_share if reference.bytes > 0 else 0.0
    unit = WorkScale(
        (1 - memory_share) / reference.flops, memory_share / reference.bytes if reference.bytes > 0 else 0.0
    )
    if config.work_scale is not None:
        factor = config.work_scale * reference.flops
    else:
        factor = config.forward_s / max(sum(unit.seconds(work)) for work in forwards)
    return WorkScale(unit.seconds_per_flop * factor, unit.seconds_per_byte * factor)
