"""How many forwards EnvPipe's stages run early: its `scheduling: ours`, from a profile.

A stage runs as many more forwards before its first backward as fit, at the stage's valley, into the backwards of the
stages behind it at their top clock::

    k = floor(time of a backward at the top x stages behind / time of a forward at the valley)

limited by the number of microbatches and by memory, and not growing from stage to stage (`core.schedules.envpipe`). The
finished forwards wait before the last stage, so that the others may run late without starving it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import InstructionType
from lightning_pfo.core.schedules.envpipe import clamp
from lightning_pfo.core.schedules.registry import make_schedule
from lightning_pfo.core.schedules.schedule import PipelineSchedule
from lightning_pfo.core.wording import shortened
from lightning_pfo.planner.profile.profile import Profile


def early_forwards(
    profile: Profile, schedule: PipelineSchedule, valleys_mhz: Sequence[int], max_in_flight: int | None = None
) -> PipelineSchedule:
    """The early-forward order in place of 1F1B.

    Args:
        profile: Times of the instructions.
        schedule: The order that it takes the place of.
        valleys_mhz: Clock of each stage's forwards.
        max_in_flight: Most microbatches whose activations fit into a stage's memory; None for no limit.

    Raises:
        ConfigurationError: If the order is not 1F1B.
    """
    check_replaces(schedule.name)
    extra = []
    for stage, valley in enumerate(valleys_mhz):
        forward_s, _ = profile.of(stage, InstructionType.FORWARD).at(valley)
        backward_s, _ = profile.of(stage, InstructionType.BACKWARD).at(profile.top_clock_mhz(stage))
        extra.append(math.floor(backward_s * (schedule.num_stages - 1 - stage) / forward_s))
    allowed = clamp(extra, schedule.num_microbatches, max_in_flight)
    return make_schedule(f"envpipe:{','.join(map(str, allowed))}", schedule.num_ranks, schedule.num_microbatches)


def check_replaces(schedule_name: str) -> None:
    """Check that early forwards can take the place of a schedule.

    Raises:
        ConfigurationError: If it is not 1F1B.
    """
    if schedule_name != "1f1b":
        raise ConfigurationError(
            "EnvPipe's early forwards (scheduling=ours) are 1F1B with more forwards at its beginning; got schedule "
            f"{shortened(schedule_name)}. Use 1f1b, or scheduling=1f1b to keep the order."
        )
