"""How much each microbatch counts in the loss of its batch: `loss of the batch = sum of weight x loss`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.core.wording import listed, shortened
from lightning_pfo.strategy.step.batches.structures import leaves_of

MicrobatchWeight = str | Callable[[Any], Any]
"""`auto`, `samples`, `tokens`, `sum`, or a function of a microbatch."""

IGNORED_LABEL = -100
"""Positions with this label have no part in a loss: the `ignore_index` of torch's cross entropy."""
NOT_FINITE = math.inf
"""Stands for NaN and infinite values among labels that have no part; NaN itself is not equal to NaN."""
WEIGHTS = ("auto", "samples", "tokens", "sum")
_MOST_DIMENSIONS, _MOST_TARGETS = 2, 2**18  # of targets that are numbers
_ITEM = re.compile(r"(.*)\[\d+\](.*)")
NAMES = ("['labels']", ".labels")
ITEMS = "num_items_in_batch"
"""What transformers calls the number by which a sum over items is divided, counted over all accumulated batches."""


def is_divided_by_items(part: Any) -> bool:
    """Whether a microbatch says by what its loss is divided: losses of microbatches add up to that of the batch."""
    ends = (f"['{ITEMS}']", f".{ITEMS}")
    return any(path.endswith(ends) and leaf is not None for path, leaf in leaves_of(part))


def check_microbatch_weight(how: MicrobatchWeight) -> None:
    """Check the setting `microbatch_weight`.

    Raises:
        ConfigurationError: If it is neither a function nor one of `WEIGHTS`.
    """
    if how not in WEIGHTS and not callable(how):
        raise ConfigurationError(
            f"microbatch_weight is one of {', '.join(map(repr, WEIGHTS))}, or a function that takes a microbatch and "
            f"returns how much it counts, such as the number of its labels; got {shortened(how)}."
        )


def weights_of(
    parts: Sequence[Any], sizes: Sequence[int], how: MicrobatchWeight = "samples", *, shifted_labels: bool = False
) -> tuple[float, ...]:
    """The weight of each microbatch's loss in the loss of the batch.

    They add up to 1, except for `sum`, where each is 1. A microbatch without labels has weight 0, and its loss is NaN
    if it is a mean over labels: leave it out, since 0 x NaN is NaN.

    Args:
        parts: The microbatches.
        sizes: How many samples each has.
        how: `samples`: the loss is a mean over samples. `tokens`: it is a mean over labels that are not -100. `sum`: it
            is a sum over samples. A function: the loss is a mean over something that it counts in a microbatch.
            `auto`: nothing is known yet, so samples. A batch with `num_items_in_batch` is a `sum`, unless a function is
            given.
        shifted_labels: Whether the first label of each sequence has no part in the loss, see `shifts_labels`.

    Raises:
        ConfigurationError: If `how` is none of these.
        BatchError: If there are no labels, or the function does not return numbers from 0 on.
    """
    check_microbatch_weight(how)
    if how == "sum" or (not callable(how) and is_divided_by_items(parts[0])):
        return (1.0,) * len(parts)
    return shares_of(counts_of(parts, sizes, how, shifted_labels=shifted_labels), sizes)


def shares_of(counts: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
    """Counts divided by their sum.

    Where there is nothing to count in the whole batch, shares are those of samples: the loss of the batch is then what
    the user's step makes of nothing (NaN for torch's mean, 0 in many steps), as on one device.
    """
    total = math.fsum(counts)
    if total == 0:
        counts, total = sizes, sum(sizes)
    return tuple(count / total for count in counts)


def counts_of(
    parts: Sequence[Any], sizes: Sequence[int], how: MicrobatchWeight = "samples", *, shifted_labels: bool = False
) -> tuple[float, ...]:
    """What the loss is a mean over, counted in each microbatch; batches and replicas add theirs up.

    Arguments and errors as for `weights_of`; `sum` counts samples.
    """
    if how == "tokens":
        return _count_labels(parts, shifted_labels)
    if callable(how):
        return tuple(_count_by(how, part, index) for index, part in enumerate(parts))
    return tuple(float(size) for size in sizes)


class Labels(NamedTuple):
    """Labels over some of which a loss may be the mean, or something else in a batch that it is divided by.

    Attributes:
        path: Where they are in a batch.
        are_shifted: Whether the first of each sequence has no part in the loss.
        ignored: Which have no part: -100, what sequences are padded with, 0 in a mask, or `NOT_FINITE`.
        class_weights: How much each class counts; none: all alike.
        are_weights: Whether these are no labels, but say themselves how much a sample counts: weights, lengths.
        are_rows: Whether it is the rows that count of tensors of which each sample has its own, such as boxes; `path`
            is that of all, see `of_all_items`.
        at_least: What the loss is divided by where there are fewer: `loss.sum() / max(number, 1)`; 0: no such number.
    """

    path: str
    are_shifted: bool
    ignored: float = IGNORED_LABEL
    class_weights: tuple[float, ...] = ()
    are_weights: bool = False
    are_rows: bool = False
    at_least: float = 0.0

    def __str__(self) -> str:
        """What counts, and where it is."""
        which = "labels that are finite" if self.ignored == NOT_FINITE else f"labels that are not {self.ignored:g}"
        which = "labels, weighted by class" if self.class_weights else which
        which = "weights or lengths" if self.are_weights else "rows" if self.are_rows else which
        where = f"{self.path}{', without the first of each sequence' if self.are_shifted else ''}"
        return f"{which} ({where}){f', at least {self.at_least:g}' if self.at_least else ''}"

    def counts(self, parts: Sequence[Any]) -> tuple[float, ...] | None:
        """How many there are in each microbatch; None where one has none at this place."""
        if self.are_rows:
            rows = [rows_of_items(part).get(self.path) for part in parts]
            return None if None in rows else tuple(float(sum(each)) for each in rows if each is not None)
        found = [dict(labelled(part)).get(self.path) for part in parts]
        if not all(map(are_integers if self.class_weights else has_values, found)):
            return None
        counts = [self.number_in(torch.as_tensor(label)) for label in found]
        return tuple(map(float, torch.stack(counts).tolist()))  # one transfer from the GPU

    def at_least_one(self) -> Labels:
        """The same, where a loss is divided by no less than one."""
        return self._replace(at_least=1.0)

    def shares(self, counts: Sequence[float], sizes: Sequence[int]) -> tuple[float, ...]:
        """How much microbatches with so many, and of these sizes, count in the loss of their batch; see `shares_of`."""
        if not self.at_least:
            return shares_of(counts, sizes)
        total = max(math.fsum(counts), self.at_least)
        return tuple(max(count, self.at_least) / total for count in counts)

    def number_in(self, label: torch.Tensor) -> torch.Tensor:
        """How many there are in a tensor of them, or how much they count."""
        counted = label[..., 1:] if self.are_shifted and label.dim() > 1 else label
        if self.are_weights:
            return counted.sum(dtype=torch.float64)
        are_counted: torch.Tensor = ~gaps_in(counted, self.ignored)
        if not self.class_weights:
            return are_counted.sum()
        weights = torch.tensor(self.class_weights, dtype=torch.float64, device=label.device)
        are_counted &= (counted >= 0) & (counted < len(weights))
        return weights[counted[are_counted].long()].sum()


def of_all_items(path: str) -> str | None:
    """The path of all items of a list for that of one: `batch[1][*]['boxes']` for `batch[1][0]['boxes']`."""
    found = _ITEM.match(path)
    return None if found is None else f"{found[1]}[*]{found[2]}"


def rows_of_items(batch: Any) -> dict[str, list[int]]:
    """How many rows the tensors have of which there are several in a list, by the path of all; see `of_all_items`."""
    found: dict[str, list[int]] = {}
    for path, leaf in leaves_of(batch):
        if has_values(leaf) and len(leaf.shape) and (of_all := of_all_items(path)):
            found.setdefault(of_all, []).append(len(leaf))
    return found


def labelled(batch: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a batch by their places, and what the items of a list have at the same one, stacked.

    As `batch[*]['labels']` of a list with a dict for each sample, where all are of one shape.
    """
    items: dict[str, list[torch.Tensor]] = {}
    for path, leaf in leaves_of(batch):
        yield path, leaf
        of_all = of_all_items(path)
        if of_all is not None and not of_all.endswith("[*]") and has_values(leaf):
            items.setdefault(of_all, []).append(torch.as_tensor(leaf))
    for path, leaves in items.items():
        if all(leaf.shape == leaves[0].shape and leaf.dtype == leaves[0].dtype for leaf in leaves):
            yield path, torch.stack(leaves)


def write_items(batch: Any, path: str, values: torch.Tensor) -> None:
    """Write into the items of a list what `labelled` has stacked of them."""
    items = [torch.as_tensor(leaf) for place, leaf in leaves_of(batch) if of_all_items(place) == path]
    for item, value in zip(items, values, strict=True):
        item.copy_(value)


def label_leaves(batch: Any, *, waits: bool) -> dict[str, Any]:
    """What may be labels, masks or targets in a batch, by its place.

    Args:
        batch: The batch.
        waits: Whether tensors on other devices than the CPU, for whose values one has to wait, are among them.
    """
    return {
        path: leaf
        for path, leaf in labelled(batch)
        if are_integers(leaf) or may_be_mask(path, leaf) or may_be_targets(leaf)
        if waits or isinstance(leaf, np.ndarray) or leaf.device.type == "cpu"
    }


def have_gaps(leaves: Iterable[Any], ignored: Collection[float]) -> bool:
    """Whether some of these labels are -100, or another that has no part."""
    return any(has_gaps(leaf, label) for leaf in leaves for label in ignored)


def are_integers(leaf: Any) -> bool:
    """Whether a leaf of a batch may be classes."""
    return has_values(leaf) and (
        leaf.dtype in (torch.int64, torch.int32) if isinstance(leaf, torch.Tensor) else leaf.dtype.kind == "i"
    )


def may_be_mask(path: str, leaf: Any) -> bool:
    """Whether a leaf of a batch may say what of others has a part in a loss."""
    return has_values(leaf) and ("mask" in path or "bool" in str(leaf.dtype))


def may_be_targets(leaf: Any) -> bool:
    """Whether a leaf of a batch may be numbers that a model learns, some of which may not be there: no image."""
    is_like = has_values(leaf) and "float" in str(leaf.dtype) and len(leaf.shape) <= _MOST_DIMENSIONS
    return is_like and math.prod(leaf.shape) <= _MOST_TARGETS


def has_values(leaf: Any) -> bool:
    """Whether a leaf of a batch has numbers that can be counted."""
    if isinstance(leaf, torch.Tensor):
        return leaf.layout == torch.strided and not leaf.is_nested
    return isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"


def has_gaps(leaf: torch.Tensor | np.ndarray[Any, Any], ignored: float) -> bool:
    """Whether some of these labels are one that has no part."""
    if ignored == NOT_FINITE and math.isfinite(float(leaf.sum())):  # in a twentieth of the time
        return False
    return bool(gaps_in(leaf, ignored).any())


def gaps_in(label: Any, ignored: float) -> Any:
    """Where labels of a tensor or an array are one that has no part."""
    if ignored != NOT_FINITE:
        return label == ignored
    return ~(torch.isfinite(label) if isinstance(label, torch.Tensor) else np.isfinite(label))


def _count_labels(parts: Sequence[Any], shifted: bool) -> tuple[float, ...]:
    counts: list[torch.Tensor] = []
    for part in parts:
        named = [(path, leaf) for path, leaf in leaves_of(part) if isinstance(leaf, (torch.Tensor, np.ndarray))]
        labels = [(Labels(path, shifted), leaf) for path, leaf in named if path.endswith(NAMES)]
        if not labels:
            raise BatchError(
                f"microbatch_weight='tokens' counts the labels that are not {IGNORED_LABEL}, in the tensor called "
                f"'labels'; the batch has {listed([path for path, _ in named]) or 'no tensors'}. Use a "
                f"function, such as microbatch_weight=lambda microbatch: (microbatch[1] != {IGNORED_LABEL}).sum()."
            )
        counts.append(torch.stack([which.number_in(torch.as_tensor(leaf)) for which, leaf in labels]).sum())
    return tuple(float(count) for count in torch.stack(counts).tolist())  # one transfer from the GPU


def _count_by(how: Callable[[Any], Any], part: Any, index: int) -> float:
    name = f"microbatch_weight={getattr(how, '__qualname__', how)}"
    try:
        count = how(part)
        number = float(count)
    except Exception as error:
        raise BatchError(
            f"{name} takes a microbatch and returns a number; for microbatch {index}, a {type(part).__name__}, it "
            f"raised {type(error).__name__}: {error}"
        ) from error
    if not 0 <= number < math.inf:
        raise BatchError(
            f"{name} returns how much a microbatch counts, 0 or more; got {number} for microbatch {index}."
        )
    return number


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss leaves out the first label of each sequence: transformers' causal language models do so.

    Decided by the names of their classes, which transformers keeps to: `...ForCausalLM`, `...LMHeadModel`, and
    `...ForConditionalGeneration` without an encoder-decoder. In a step that shifts labels itself, count them by a
    function.
    """
    for module in model.modules():
        name = type(module).__name__
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return True
        if name.endswith("ForConditionalGeneration"):
            return not getattr(getattr(module, "config", None), "is_encoder_decoder", True)
    return False
