"""Whether the loss of a batch is the mean of its microbatches' losses: compared once, on the first training batch.

A pipeline trains on that mean, and on one device the user's step computes the loss of the whole batch. They are the
same for a mean over samples, and they are not for a sum, for a loss that compares samples with each other, and for
batches whose first dimension is not that of the samples. So the pipeline runs forward twice before its first training
step: by microbatches, and with all of them as one. Layers are in evaluation mode in both, without dropout and with the
running statistics of batch norm, so that only these things can make a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

_RANDOM = 3  # how far apart random losses must be, in what they spread themselves
_NO_WEIGHTED_MEAN = 0.01  # beyond this, losses outside of those of the microbatches are an error ...
_BEYOND_ROUNDING = 4  # ... and beyond so many times what rounding explains
_SMALLEST = 1e-3  # smaller losses are taken for sums that cancel, of which only rounding is left
_NO_DIFFERENCE = 1e-6  # of such sums, in any type, ...
_OF_TOLERANCE = 0.1  # ... or as much of a tolerance as this, which is less in fp64
_DIGITS = range(6, 18)


@dataclass(frozen=True)
class Losses:
    """The losses of the same samples, by one draw of random numbers.

    Attributes:
        of_microbatches: The loss of each microbatch.
        of_all: The loss of all their samples as one batch.
        weights: How much each microbatch counts; empty: all the same.
    """

    of_microbatches: tuple[float, ...]
    of_all: float
    weights: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """What the pipeline trains on."""
        if not self.weights:
            return fmean(self.of_microbatches)
        pairs = zip(self.of_microbatches, self.weights, strict=True)
        return sum(loss * weight for loss, weight in pairs if weight)


def differ(draws: Sequence[Losses], tolerance: float) -> bool:
    """Whether the loss of all samples is another one than the mean over microbatches, by more than rounding and chance.

    A loss that is not finite on one device is not compared.
    """
    means, wholes = [draw.mean for draw in draws], [draw.of_all for draw in draws]
    if not (_finite(means) and _finite(wholes)):
        return _finite(wholes)  # such as that of a microbatch over no labels
    difference = abs(fmean(means) - fmean(wholes))
    chance = _RANDOM * (max(means) - min(means) + max(wholes) - min(wholes))
    rounding = max(tolerance * _scale(draws), min(_NO_DIFFERENCE, _OF_TOLERANCE * tolerance))
    return difference > rounding + chance


def is_no_weighted_mean(draws: Sequence[Losses], tolerance: float) -> bool:
    """Whether the loss of all samples is not even a mean of the microbatches' losses with other weights.

    Any weighted mean, as over tokens of which microbatches have different numbers, lies between the least and the
    largest of them.
    """
    found = [loss for draw in draws for loss in draw.of_microbatches]
    if not _finite(found):
        return False
    whole = fmean(draw.of_all for draw in draws)
    outside = max(min(found) - whole, whole - max(found))
    return outside > max(_NO_WEIGHTED_MEAN, _BEYOND_ROUNDING * tolerance) * _scale(draws)


def is_no_sum(draws: Sequence[Losses]) -> bool:
    """Whether losses that are added up, since weights say so, are means: their sum is as many times the loss of all."""
    number = len(draws[0].of_microbatches)
    if draws[0].weights != (1.0,) * number:
        return False
    return _is_times(number, [draw.of_all for draw in draws], [draw.mean for draw in draws])


def no_weights_explain(draws: Sequence[Losses], tolerance: float) -> bool:
    """Whether the loss of all samples is another one, and no mean of losses; or those of means are added up."""
    is_other = bool(draws) and differ(draws, tolerance)
    return is_other and (is_no_sum(draws) or is_no_weighted_mean(draws, tolerance))


def _scale(draws: Sequence[Losses]) -> float:
    """What differences are relative to: losses may cancel each other, in the mean or among the samples."""
    return max(_SMALLEST, *(abs(loss) for draw in draws for loss in (draw.of_all, *draw.of_microbatches)))


def _finite(numbers: Sequence[float]) -> bool:
    return all(abs(number) < float("inf") for number in numbers)


_MIXES = (
    "What mixes samples before the first layer (mixup, x.flip(0)) belongs in collate_fn or on_after_batch_transfer, "
    "which have the whole batch."
)


def apart(one: float, other: float) -> tuple[str, str]:
    """Two numbers that differ, with as many digits as it takes to see that."""
    written = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in _DIGITS)
    return next((pair for pair in written if pair[0] != pair[1]), (f"{one:.6g}", f"{other:.6g}"))


def describe(
    draws: Sequence[Losses], num_microbatches: int | None, tolerance: float, batch: str = "the first batch"
) -> str:
    """Both numbers, and ways out.

    Args:
        draws: The losses.
        num_microbatches: Number of microbatches of the batch; None: what they come to is joined before the loss.
        tolerance: The relative difference that rounding explains.
        batch: Which one it is.
    """
    first = draws[0]
    mean, of_all = apart(first.mean, first.of_all)
    if num_microbatches is None:
        return (
            f"The loss of {batch} is {of_all} on one device, but {mean} of what its "
            f"microbatches come to, joined by loss_over='batch' (both forward only, torch's layers in eval mode). Only "
            f"the end of the step sees all samples, what follows the last layer: layers before it compare samples, or "
            f"the step knows how many there are. {_MIXES} If this is meant to be so, "
            f"check_loss=False leaves the comparison out."
        )
    number = len(first.of_microbatches)
    first_of = "" if number == num_microbatches else f" (the first {number} of {num_microbatches})"
    trains_on = "the mean"
    if is_no_sum(draws):
        trains_on = "the sum"
        cause = (
            f"It is {number} times as large, so the loss of each is a mean: leave microbatch_weight='sum' out, and "
            f"num_items_in_batch, by which the model does not divide."
        )
    elif _is_sum(draws):
        cause = (
            f"It is {number} times as large, so the loss is a sum. Use microbatch_weight='sum', or reduction='mean'."
        )
    elif is_no_weighted_mean(draws, tolerance):
        cause = "" if any(first.of_microbatches) else "It is 0 on every microbatch. "
        cause += (
            "No weights of the microbatches explain that. A loss that compares the samples of a batch with each "
            "other (contrastive, CLIP, correlations) needs all of them: use loss_over='batch' with schedule='gpipe'; "
            "or fewer microbatches of a larger batch, where it need not see all samples."
        )
    else:
        cause = (
            "Either microbatches have different weights in it, as with class weights or labels that are ignored, and "
            "nothing in the batch or the module gives them; gradients accumulated over batches differ likewise: use "
            "microbatch_weight='tokens', which counts labels that are not -100, or a function of a microbatch that "
            "counts what the loss is a mean over. Or it is no mean, as the root of one (RMSE) or a ratio of two, or a "
            "part of it compares samples, as auxiliary losses do that balance the load of experts: use "
            "loss_over='batch' with schedule='gpipe'. Or the step pads samples to the longest, or images to the "
            "largest, of each microbatch: pad in collate_fn."
        )
    return (
        f"The loss of {batch} is {of_all} on one device, but a pipeline trains on {trains_on} of its "
        f"microbatches' losses{first_of}, which is {mean} (both forward only, torch's layers in eval mode). {cause} "
        f"{_MIXES} If the first dimension of the batch is time, the batch is cut along it: use batch_dim=1. If all "
        f"this is meant to be so, check_loss=False leaves the comparison out."
    )


def _is_sum(draws: Sequence[Losses]) -> bool:
    """Whether the loss of all samples is as many times the mean as there are microbatches."""
    return _is_times(len(draws[0].of_microbatches), [draw.mean for draw in draws], [draw.of_all for draw in draws])


def _is_times(number: int, losses: Sequence[float], others: Sequence[float]) -> bool:
    """Whether the others are `number` times the losses, up to chance."""
    times = [number * loss for loss in losses]
    chance = max(times) - min(times) + max(others) - min(others)
    return fmean(times) != 0 and abs(fmean(others) - fmean(times)) < 0.01 * abs(fmean(times)) + chance
