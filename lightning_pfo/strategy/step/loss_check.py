"""Whether the loss of a batch is the mean of its microbatches' losses: compared once, on the first training batch.

A pipeline trains on that mean, and on one device the user's step computes the loss of the whole batch. They are the
same for a mean over samples, and they are not for a sum, for a loss that compares samples with each other, and for batches
whose first dimension is not that of the samples. So the pipeline runs forward twice before its first training step:
by microbatches, and with all of them as one. Both runs are in evaluation mode, without dropout and with the running
statistics of batch norm, so that only these things can make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

_ROUNDING = 1e-3  # of fp32; it sums in another order, with other kernels for another size
_BY_DTYPE = 2  # rounding errors of a narrower type, which do not add up over the samples of a mean
_RANDOM = 3  # how far apart random losses must be, in what they spread themselves
_NO_WEIGHTED_MEAN = 0.01  # beyond this, losses outside of those of the microbatches are an error

EXTRA_DRAWS = 3
"""How often losses that differ are computed again with other random numbers: do they differ by chance?"""
LARGEST_BYTES = 256 * 2**20
"""Of the outputs of the model that the comparison may hold; of larger ones, fewer microbatches are compared."""


@dataclass(frozen=True)
class Losses:
    """The losses of the same samples, by one draw of random numbers.

    Attributes:
        of_microbatches: The loss of each microbatch.
        of_all: The loss of all their samples as one batch.
    """

    of_microbatches: tuple[float, ...]
    of_all: float

    @property
    def mean(self) -> float:
        """What the pipeline trains on."""
        return fmean(self.of_microbatches)


def tolerance_of(dtypes: Sequence[torch.dtype]) -> float:
    """The relative difference that rounding explains, where losses are computed in these types."""
    return max([_ROUNDING, *(_BY_DTYPE * torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point)])


def differ(draws: Sequence[Losses], tolerance: float) -> bool:
    """Whether the loss of all samples is another one than the mean over microbatches, by more than rounding and chance.

    Losses that are not finite are not compared.
    """
    means, wholes = [draw.mean for draw in draws], [draw.of_all for draw in draws]
    if not _finite([*means, *wholes]):
        return False
    difference = abs(fmean(means) - fmean(wholes))
    chance = _RANDOM * (max(means) - min(means) + max(wholes) - min(wholes))
    return difference > tolerance * _scale(draws) + chance


def is_no_weighted_mean(draws: Sequence[Losses], tolerance: float) -> bool:
    """Whether the loss of all samples is not even a mean of the microbatches' losses with other weights.

    Any weighted mean, as over tokens of which microbatches have different numbers, lies between the least and the
    largest of them.
    """
    found = [loss for draw in draws for loss in draw.of_microbatches]
    whole = fmean(draw.of_all for draw in draws)
    outside = max(min(found) - whole, whole - max(found))
    return outside > max(_NO_WEIGHTED_MEAN, tolerance) * _scale(draws)


def _scale(draws: Sequence[Losses]) -> float:
    return max(*(abs(draw.of_all) for draw in draws), *(abs(draw.mean) for draw in draws))


def _finite(numbers: Sequence[float]) -> bool:
    return all(abs(number) < float("inf") for number in numbers)


def describe(draws: Sequence[Losses], num_microbatches: int) -> str:
    """Both numbers, and ways out."""
    first = draws[0]
    number = len(first.of_microbatches)
    compared = "" if number == num_microbatches else f", the first {number} of {num_microbatches}"
    what = (
        f"A pipeline trains on the mean of its microbatches' losses, which for the first batch is {first.mean:.6g}"
        f"{compared}; but the loss of their samples as one batch, as on one device, is {first.of_all:.6g} (both "
        f"forward only, in evaluation mode). "
    )
    causes = []
    ratio = first.of_all / first.mean if first.mean else 0.0
    if abs(ratio - number) < 0.01 * number:
        causes.append(
            f"It is {number} times as large: the loss is a sum. Use reduction='mean', or divide it by the number of "
            f"samples in the step."
        )
    elif not any(first.of_microbatches) and len(set(first.of_microbatches)) == 1:
        causes.append(
            "It is 0 on every microbatch: the loss compares the samples of a batch with each other, and a microbatch "
            "has too few."
        )
    causes.append(
        "A loss that compares samples (contrastive, CLIP) needs them in one microbatch: use num_microbatches=1, or a "
        "larger batch in as few. Means with weights (class weights, labels of which some are -100) differ as they do "
        "with accumulated gradients: divide the sum by the number of samples in the step for equal ones. The first "
        "dimension of the batch must be that of the samples: use batch_first=True where it is time. If it is meant to "
        "be so, check_loss=False leaves the comparison out."
    )
    return what + " ".join(causes)
