"""What the loss of a step may be a mean over: labels of its batch, some of which have no part, or count more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lightning_pfo.strategy.compat.modules import modules_of
from lightning_pfo.strategy.step.batches.weights import (
    IGNORED_LABEL,
    NAMES,
    NOT_FINITE,
    Labels,
    are_integers,
    gaps_in,
    has_gaps,
    has_values,
    labelled,
    may_be_targets,
    rows_of_items,
    write_items,
)

_MOST_LEAVES = 32  # of a batch that are looked at
_MOST_CLASSES = 2**12  # that weights are looked for of
_MOST_BITS = 6
_MOST_ROWS = 8
_MOST_DIMENSIONS = 2  # of weights that are no mask


def labels_with_gaps(parts: Sequence[Any], ignored: Collection[int], *, are_shifted: bool) -> list[Labels]:
    """What may be labels of which some have no part, the likelier first.

    Args:
        parts: The microbatches.
        ignored: What may have no part: -100, and others that losses were seen to leave out.
        are_shifted: Whether it is likelier that the first of each sequence has no part.
    """
    leaves = [(path, leaf) for part in parts for path, leaf in labelled(part) if are_integers(leaf)]
    found = {(path, label) for path, leaf in leaves for label in ignored if has_gaps(leaf, label)}
    named = sorted(found, key=lambda each: (not each[0].endswith(NAMES), each))
    return [Labels(path, shift, label) for shift in (are_shifted, not are_shifted) for path, label in named]


def labels_without_gaps(
    batch: Any, owner: nn.Module, known: Collection[int] = (), size: int | None = None
) -> list[Labels]:
    """What else a loss may be a mean over, the likelier first.

    What is no padding or not masked; classes that have weights; what has weights or lengths itself; and rows of tensors
    of which each sample has its own, as boxes. Padding is what
    rows end with most often, or the least or the largest value (0, -1, 255 where segments have none).

    Args:
        batch: The batch.
        owner: The user's module, which may have weights of classes itself or in modules without parameters.
        known: Labels that losses were seen to leave out.
        size: How many samples it has: lists of other lengths have no item for each. None: nobody knows.
    """
    found = [(path, torch.as_tensor(leaf)) for path, leaf in labelled(batch) if has_values(leaf)]
    found = [(path, leaf) for path, leaf in found if leaf.numel()][:_MOST_LEAVES]
    leaves = [(path, leaf.detach().cpu()) for path, leaf in found]
    by_class = list(dict.fromkeys(_class_weights(owner)))
    labels: list[Labels] = []
    weights: list[Labels] = []
    for path, leaf in leaves:
        may_be_shifted = (False, True)[: leaf.dim()]
        if may_be_targets(leaf) and has_gaps(leaf, NOT_FINITE):
            labels.append(Labels(path, False, NOT_FINITE))
        if not leaf.is_floating_point() and not leaf.is_complex() and leaf.dim():
            paddings = dict.fromkeys((*map(float, sorted(known)), *_paddings(leaf)))
            ignored = [value for value in paddings if value != IGNORED_LABEL]
            ways: list[tuple[float, tuple[float, ...]]] = [(value, ()) for value in ignored]
            for value in (IGNORED_LABEL, *ignored) if are_integers(leaf) else ():
                counted = leaf[leaf != value]  # 255 of segments is no class
                ways += [(value, each) for each in by_class if counted.numel() and int(counted.max()) < len(each)]
            labels += [Labels(path, shift, *way) for way in ways for shift in may_be_shifted]
        if _may_be_weights(leaf):
            weights += [Labels(path, shift, are_weights=True) for shift in may_be_shifted or (False,)]
    of_items = rows_of_items(batch).items()
    rows = [Labels(path, False, are_rows=True) for path, each in of_items if size in (None, len(each))]
    return labels + weights + rows[:_MOST_ROWS]


def with_least(found: Iterable[Labels], parts: Sequence[Any]) -> list[Labels]:
    """Labels, and each of which a microbatch has less than one by which a loss may be divided as if there were one."""
    with_counts = [(labels, labels.counts(parts)) for labels in found]
    return [
        each
        for labels, counts in with_counts
        for each in ([labels, labels.at_least_one()] if counts is not None and min(counts) < 1 else [labels])
    ]


def _may_be_weights(leaf: torch.Tensor) -> bool:
    """Whether these may be weights of samples, or of what rows have; or lengths. Not images, nor tokens."""
    if leaf.is_complex() or not bool((leaf >= 0).all()):
        return False
    if not leaf.is_floating_point():
        return leaf.dim() <= 1
    return leaf.dim() <= _MOST_DIMENSIONS or bool(((leaf == 0) | (leaf == 1)).all())


def _paddings(leaf: torch.Tensor) -> list[float]:
    """The values of a leaf that may have no part in a loss; none where all would have none, and 0 of a full mask."""
    if bool((leaf == 1).all()):
        return [0.0]
    ((end, _),) = Counter(leaf[..., -1].flatten().tolist()).most_common(1)
    values = dict.fromkeys((end, leaf.min().item(), leaf.max().item()))
    return [float(value) for value in values if not bool((leaf == value).all())]


def _class_weights(owner: nn.Module) -> Iterator[tuple[float, ...]]:
    loss_fn = getattr(owner, "loss_fn", None)  # of a loop of the user's own, which has it beside the model
    for module in (*modules_of(owner), *(modules_of(loss_fn) if isinstance(loss_fn, nn.Module) else ())):
        if module is not owner and next(module.parameters(recurse=False), None) is not None:
            continue  # statistics of a layer
        for tensor in (*module.buffers(recurse=False), *vars(module).values()):
            is_there = isinstance(tensor, torch.Tensor) and not tensor.is_meta
            if is_there and tensor.is_floating_point() and tensor.dim() == 1 and 1 < len(tensor) <= _MOST_CLASSES:
                yield tuple(tensor.detach().tolist())


def take_labels_away(batch: Any, parts: Sequence[Any], labels: Sequence[Labels]) -> bool:
    """Give microbatches other numbers of labels, where some have no part in a loss already, and other weights.

    In some microbatches, for each kind of labels in others, rows keep their last label and have it first too,
    as do masks; of weights, lengths and targets a half or less is left, of each kind another share, where it can be.

    Args:
        batch: The batch.
        parts: Its microbatches.
        labels: Labels that it may have; of labels without any gap nothing is changed.

    Returns:
        Whether they have, and the batch alike: it has not where microbatches are copies.
    """
    kinds = dict.fromkeys(Labels(each.path, False, each.ignored, are_weights=each.are_weights) for each in labels)
    found = [(kind, [dict(labelled(of)).get(kind.path) for of in (batch, *parts)]) for kind in kinds]
    tensors = [(kind, list(map(torch.as_tensor, each))) for kind, each in found if all(map(has_values, each))]
    tensors = [(kind, each) for kind, each in tensors if _may_be_changed(kind, each[0])]
    less: list[list[float]] = []
    for number, (kind, (of_batch, *of_parts)) in enumerate(tensors):
        before = list(map(kind.number_in, (of_batch, *of_parts)))
        for part in _changed(of_parts, number):
            if not kind.are_weights or part.dtype == torch.bool:
                _take_away(part, kind.ignored if not kind.are_weights else 0)
            elif part.dim() > 1 and bool(((part == 0) | (part == 1)).all()):
                _take_targets_away(part, 2 + number // 2)
            elif part.is_floating_point():
                part.mul_(1 / (2 + number))  # of others that were alike another share is left
            else:
                part.sub_(part.clamp(min=0) // 2)  # of what is 1 nothing
        if "[*]" in kind.path:
            for of, values in zip((batch, *parts), (of_batch, *of_parts), strict=True):
                write_items(of, kind.path, values)
        # one after the other: what is taken away of a mask comes to what is not masked
        less.append(
            [float(then - kind.number_in(now)) for now, then in zip((of_batch, *of_parts), before, strict=True)]
        )
    return any(of_batch for of_batch, *_ in less) and all(math.isclose(each[0], sum(each[1:])) for each in less)


def _changed(parts: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    """The microbatches that a kind of labels is changed in: every second one, and of further kinds others."""
    bits = min(len(parts), _MOST_BITS)
    every_second = [sum(1 << bit for bit in range(first, bits, 2)) for first in (0, 1)]
    patterns = list(dict.fromkeys((*every_second, *range(1, 2**bits - 1))))
    pattern = patterns[number % len(patterns)]
    return [part for index, part in enumerate(parts) if pattern >> index % bits & 1]


def _may_be_changed(labels: Labels, found: torch.Tensor) -> bool:
    return labels.are_weights or has_gaps(found, labels.ignored) or bool(not labels.ignored and (found == 1).all())


def _take_targets_away(targets: torch.Tensor, period: int) -> None:
    """Leave the last target of each row, and none but in the first of so many rows."""
    _take_away(targets, 0)
    if targets.shape[-1] > 1:
        targets[..., :1] = 0
    is_left = torch.arange(len(targets), device=targets.device) % period == 0
    targets[~is_left] = 0


def _take_away(label: torch.Tensor, ignored: float) -> None:
    """Leave the last label of each row, and have it first too, as a mean may leave the first of each sequence out."""
    if not label.dim():
        return
    are_there = ~gaps_in(label, ignored)
    last = are_there.shape[-1] - 1 - are_there.flip(-1).int().argmax(-1, keepdim=True)
    kept, have_any = label.gather(-1, last), are_there.any(-1, keepdim=True)
    gap = torch.full_like(kept, math.nan if ignored == NOT_FINITE else ignored)
    label.copy_(gap.expand_as(label))
    label.scatter_(-1, last, kept)
    if label.dim() > 1:
        label[..., :1] = torch.where(have_any, kept, gap)
