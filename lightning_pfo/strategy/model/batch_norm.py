"""Running statistics of batch norm over whole batches, as torchgpipe's deferred batch norm has them.

What is normalised is a microbatch, with its own statistics. On one device the running statistics are those of whole
batches: one update per batch, by the mean and the unbiased variance of all its samples. These follow from those of the
microbatches (Chan et al., "Updating formulae and a pairwise algorithm for computing sample variances", 1979). Forwards
that run again in backward, to save memory, change nothing.

torchgpipe: Kim et al., "torchgpipe: On-the-fly Pipeline Parallelism for Training Giant Models", 2020.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches

BATCH_NORM = ("microbatch", "deferred")

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


class _Statistics(NamedTuple):
    """Of one call: how many values a channel has, their mean, and their unbiased variance."""

    number: int
    mean: torch.Tensor
    variance: torch.Tensor


class DeferredBatchNorms:
    """The batch norms of a module, whose running statistics are updated once for each batch.

    Args:
        root: The module.
        patches: Gives the batch norms back when it is closed.
    """

    def __init__(self, root: nn.Module, patches: Patches) -> None:
        self._calls: dict[tuple[int, int, BatchNorm], list[_Statistics]] | None = None
        self._counts: dict[BatchNorm, int] | None = None
        self._stage = 0
        for module in root.modules():
            if isinstance(module, BatchNorm) and module.running_mean is not None:
                patches.set(module, "forward", self._deferred(module, module.forward))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Run the microbatches of a training batch, and then update the running statistics."""
        self._calls = {}
        try:
            yield
            for (_, _, module), found in sorted(self._calls.items(), key=lambda item: item[0][:2]):
                _update(module, found)
        finally:
            self._calls = None

    @contextmanager
    def forward_of(self, stage: int) -> Iterator[None]:
        """Run the forward of a microbatch on a stage; calls outside of one count for nothing."""
        self._counts, self._stage = {}, stage
        try:
            yield
        finally:
            self._counts = None

    def _deferred(self, module: BatchNorm, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(forward)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            if self._calls is None or not module.training:
                return forward(*args, **kwargs)
            result, mean, variance = _statistics_apart(module, functools.partial(forward, *args, **kwargs))
            if self._counts is not None:
                values = args[0] if args else kwargs["input"]
                # on one device each call in a step is an update: those of microbatches belong together in turn
                count = self._counts[module] = self._counts.get(module, -1) + 1
                statistics = _Statistics(values.numel() // values.shape[1], mean, variance)
                self._calls.setdefault((self._stage, count, module), []).append(statistics)
            return result

        return call


def _statistics_apart(
    module: BatchNorm, forward: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Run a batch norm and return its result, with the mean and the unbiased variance that it would have noted."""
    before = {name: getattr(module, name) for name in ("running_mean", "running_var", "num_batches_tracked")}
    momentum = module.momentum
    try:
        for name, value in before.items():
            setattr(module, name, None if value is None else torch.zeros_like(value))
        module.momentum = 1.0  # of what was there before nothing is left
        result = forward()
        assert module.running_mean is not None
        assert module.running_var is not None
        return result, module.running_mean, module.running_var
    finally:
        module.momentum = momentum
        for name, value in before.items():
            setattr(module, name, value)


@torch.no_grad()
def _update(module: BatchNorm, calls: Sequence[_Statistics]) -> None:
    """Update running statistics by those of all calls together."""
    assert module.running_mean is not None
    assert module.running_var is not None
    means = torch.stack([call.mean for call in calls])
    numbers = means.new_tensor([call.number for call in calls]).unsqueeze(1)
    total = sum(call.number for call in calls)
    mean = (means * (numbers / total)).sum(0)
    squares = torch.stack([call.variance for call in calls]) * (numbers - 1) + numbers * (means - mean).square()
    momentum = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if momentum is None:  # the mean over all batches
            momentum = 1 / float(module.num_batches_tracked)
    assert momentum is not None
    module.running_mean.lerp_(mean, momentum)
    module.running_var.lerp_(squares.sum(0) / (total - 1), momentum)


def defer_batch_norms(root: nn.Module, how: str, patches: Patches, *, compiles: bool) -> DeferredBatchNorms | None:
    """Let the running statistics of batch norms be those of whole batches, if it is asked for.

    Args:
        root: The module.
        how: `microbatch`: each microbatch updates them, as each batch does on one device. `deferred`: each batch does.
        patches: Gives the batch norms back when it is closed.
        compiles: Whether layers are compiled.

    Raises:
        ConfigurationError: If there is no such way, or batch norms are compiled.
    """
    check_batch_norm(how)
    if how == "microbatch":
        return None
    if compiles and any(isinstance(module, BatchNorm) for module in root.modules()):
        raise ConfigurationError(
            "batch_norm='deferred' notes what a batch norm computes, which compiled layers do not show. Leave out "
            "compile=True, or batch_norm='deferred'."
        )
    return DeferredBatchNorms(root, patches)


def what_they_normalise(
    root: nn.Module, how_many: Sequence[int], *, are_deferred: bool, is_end_whole: bool = False
) -> str:
    """What is said of the batch norms of a module that are in training mode; nothing if there are none.

    Args:
        root: The module.
        how_many: How many samples the microbatches of a batch have.
        are_deferred: Whether their running statistics are those of batches.
        is_end_whole: Whether the end of the step is given the whole batch.
    """
    names = [name for name, module in root.named_modules() if isinstance(module, BatchNorm) and module.training]
    if not names or len(how_many) < 2:
        return ""
    samples = " or ".join(map(str, sorted(set(how_many))))
    running = "are those of batches" if are_deferred else "change with each (batch_norm='deferred': once for a batch)"
    number = f"{len(names)} batch norms normalise" if len(names) > 1 else "A batch norm normalises"
    but = " In the end of the step it is that (loss_over='batch')." if is_end_whole else ""
    return (
        f"{number} microbatches of {samples} samples, not the batch of {sum(how_many)}, as when gradients are "
        f"accumulated ({names[0]}{', ...' if len(names) > 1 else ''}); running statistics {running}.{but} For more "
        f"samples use fewer microbatches (num_microbatches=...) or larger batches, or a norm that does not look at "
        f"other samples. See 'Batch norm' in docs/strategy.md."
    )


def in_our_words(error: Exception) -> Exception:
    """What ended a microbatch; where a batch norm had a single value per channel, with the way out."""
    said = told_of_single(str(error)) if isinstance(error, ValueError) else ""
    if not said:
        return error
    explained = ConfigurationError(said)
    explained.__cause__ = error
    return explained


def told_of_single(problem: str) -> str:
    """What is said where a batch norm had a single value per channel, with the way out; nothing of other problems."""
    if "more than 1 value per channel" not in problem:
        return ""
    problem = problem.removesuffix(".")
    return (
        f"A batch norm in training mode needs two samples or more in each microbatch, and one has a single one "
        f"({problem}). Use fewer microbatches (num_microbatches=...), larger batches, or drop_last=True in the loader "
        f"if it is the last batch that is too small."
    )


def least_samples(root: nn.Module) -> int:
    """How many samples a microbatch should have, for the batch norms of a module that are in training mode."""
    return 2 if any(isinstance(module, BatchNorm) and module.training for module in root.modules()) else 1


def check_batch_norm(how: str) -> None:
    """Check the setting `batch_norm`.

    Raises:
        ConfigurationError: If it is none of `BATCH_NORM`.
    """
    if how not in BATCH_NORM:
        raise ConfigurationError(f"batch_norm is {' or '.join(map(repr, BATCH_NORM))}; got {how!r}.")
