"""The orders of the original EnvPipe, and which of them hang there."""

from itertools import pairwise, product

from lightning_pfo.core.schedules.one_stage_per_rank import warm_up_orders
from lightning_pfo.core.schedules.schedule import PipelineSchedule


def original_clamp(extra, num_microbatches):
    """EnvPipe's: k may grow after a stage that runs all its forwards first. That exception is the bug."""
    k = list(extra)
    num_stages = len(k)
    for stage in range(num_stages - 1):
        if k[stage] < k[stage + 1] and k[stage] + num_stages - stage != num_microbatches:
            k[stage + 1] = k[stage]
    return tuple(k)


def vectors():
    """All extra forwards of 2 to 4 stages with up to 9 microbatches, and of 5 stages with up to 7."""
    for num_stages in range(2, 6):
        for num_microbatches in range(num_stages, 10 if num_stages < 5 else 8):
            rooms = [range(num_microbatches - (num_stages - stage) + 1) for stage in range(num_stages - 1)]
            for extra in product(*rooms):
                yield (*extra, 0), num_microbatches


def hangs_in_the_original(extra, num_microbatches):
    """Two adjacent stages before the last both run all forwards first."""
    num_stages = len(extra)
    all_first = [k == num_microbatches - (num_stages - stage) for stage, k in enumerate(extra[:-1])]
    return any(a and b for a, b in pairwise(all_first))


def hanging_orders():
    """Those vectors, as the original clamps them, and numbers of microbatches in which it hangs."""
    clamped = {(original_clamp(extra, num_microbatches), num_microbatches) for extra, num_microbatches in vectors()}
    return {case for case in clamped if hangs_in_the_original(*case)}


def unclamped(extra, num_microbatches):
    """The order with so many extra forwards, though one stage may warm up more than the stage before it."""
    num_stages = len(extra)
    warm_ups = [min(num_microbatches, num_stages - stage + k) for stage, k in enumerate(extra)]
    return PipelineSchedule("envpipe", num_stages, num_microbatches, warm_up_orders(warm_ups, num_microbatches))
