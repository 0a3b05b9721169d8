"""Joining what microbatches have come to: in the order in which the step on the whole batch would have it.

Along the dimension that grows with the number of samples. Where a sample has several rows of it, they may lie together,
as after `x.flatten(0, 1)`, or in blocks of all samples, as after `torch.cat([first_view, second_view])`: forms do not
tell, so values have to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.model.tracing.dividing.program import StageProgram, counts_sequences, growing

_LARGEST_ERROR = 0.05
"""Of values in the right order, relative to their size: what rounding may do in 16 bits ..."""
_CLEARER = 10
"""... and so many times that is the error in any other order."""

_RULE = "loss_over='batch' joins what the last stage has of the microbatches, but"
_WAY_OUT = (
    "Keep samples in one dimension up to the last layer, or move stage boundaries with partition='custom:...' so that "
    "the last stage compares samples."
)


@dataclass(frozen=True)
class Join:
    """How the values of microbatches become one.

    Attributes:
        dim: The dimension along which samples lie in a row; None: the values are no samples, and their mean counts.
        rows: How many rows each sample has of it.
        blocks: In how many blocks of all samples the rows lie; None: it is not known.
        counts: Whether it is how many sequences have how many steps, as in a `PackedSequence`: that of all is the sum.
    """

    dim: int | None
    rows: int = 1
    blocks: int | None = 1
    counts: bool = False

    def __call__(self, values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """Join the values of microbatches of these numbers of samples; gradients flow.

        Raises:
            ConfigurationError: If they should be the same and are not, or of one size.
        """
        if self.counts:
            longest = max(map(len, values))
            return torch.stack([pad(value, (0, longest - len(value))) for value in values]).sum(0)
        if self.dim is None:
            return _mean(values, sizes)
        others = {tuple(value.movedim(self.dim, 0).shape[1:]) for value in values}
        if len(others) > 1:
            raise ConfigurationError(
                f"{_RULE} a value has other sizes in each, depending on values: {sorted(others)} beside the samples. "
                f"Pad all to one length (pad_packed_sequence(..., total_length=...)). {_WAY_OUT}"
            )
        if self.blocks in (None, 1):
            return torch.cat(list(values), self.dim)
        apart = [value.unflatten(self.dim, (self.blocks, -1)) for value in values]  # type: ignore[no-untyped-call]
        return torch.cat(apart, self.dim + 1).flatten(self.dim, self.dim + 1)


def joins_of(parts: Sequence[StageProgram], end: StageProgram, sizes: Sequence[int]) -> dict[int, Join]:
    """How each value is joined that the end of the step begins with, by label.

    Args:
        parts: What the last stage does of each microbatch.
        end: What it does of the whole batch.
        sizes: How many samples each microbatch has.

    Raises:
        ConfigurationError: If a value is none of samples in a row.
    """
    return {label: _join_of(label, parts, end, sizes) for label in end.received}


def _join_of(label: int, programs: Sequence[StageProgram], end: StageProgram, sizes: Sequence[int]) -> Join:
    parts, whole = [program.forms[label].shape for program in programs], end.forms[label].shape
    dims = growing(parts[0], whole)
    if label in end.varying and (varies := end.forms[label].varies):
        if counts_sequences(label, end.events):
            return Join(None, counts=True)
        dims = [dim for dim in dims if dim not in varies]
        if not dims or end.forms[label].dim() != len(parts[0]):
            raise ConfigurationError(
                f"{_RULE} the size of one of its values (dimension {min(varies)} of {end.forms[label].dim()}) depends "
                f"on values, as after x[mask], so that nobody knows which rows belong to which sample. Put them back "
                f"into a tensor that has all samples (index_add, masked_scatter, pad_packed_sequence) before the last "
                f"layers, or leave loss_over='batch' out."
            )
    if not dims:
        return Join(None)
    dim = dims[0]
    lengths = [shape[dim] if dim < len(shape) else 0 for shape in parts]
    if len(dims) > 1 or len(parts[0]) != len(whole) or sum(lengths) != whole[dim]:
        raise ConfigurationError(
            f"{_RULE} a value of shape {tuple(parts[0])} of the first of {len(parts)} microbatches has shape "
            f"{tuple(whole)} for the whole batch: an earlier layer compares samples, or microbatches are padded "
            f"otherwise (pad in collate_fn then). {_WAY_OUT}"
        )
    rows = lengths[0] // sizes[0]
    if rows > 1 and all(length == rows * size for length, size in zip(lengths, sizes, strict=True)):
        return Join(dim, rows, None)
    return Join(dim)


def find_blocks(
    joins: Mapping[int, Join],
    parts: Sequence[Mapping[int, torch.Tensor]],
    whole: Mapping[int, torch.Tensor],
    sizes: Sequence[int],
) -> dict[int, int]:
    """In how many blocks rows lie, found by comparison with the whole batch.

    Args:
        joins: How values are joined, as far as is known.
        parts: The values of each microbatch.
        whole: The values of the whole batch.
        sizes: How many samples each microbatch has.

    Raises:
        ConfigurationError: If no order, or several, give the values of the whole batch.
    """
    found: dict[int, int] = {}
    for label, join in joins.items():
        if join.blocks is not None:
            continue
        candidates = [number for number in range(1, join.rows + 1) if join.rows % number == 0]
        values = [part[label] for part in parts]
        errors = [_error(Join(join.dim, join.rows, blocks)(values, sizes), whole[label]) for blocks in candidates]
        best = min(range(len(candidates)), key=errors.__getitem__)
        others = errors[:best] + errors[best + 1 :]
        if not (errors[best] <= _LARGEST_ERROR and min(others) > _CLEARER * errors[best]):
            raise ConfigurationError(
                f"{_RULE} in which order the {join.rows} rows that each sample has of a value of shape "
                f"{tuple(whole[label].shape)} lie in the whole batch cannot be told: its values are random, equal, or "
                f"depend on other samples. Keep samples in a dimension of their own up to the last layer (one call of "
                f"the model for each view, not torch.cat), and draw random numbers in the dataset or a submodule."
            )
        found[label] = candidates[best]
    return found


def _error(value: torch.Tensor, expected: torch.Tensor) -> float:
    if not value.is_floating_point():
        return float((value != expected).double().mean())
    value, expected = value.double(), expected.double()
    return float((value - expected).norm() / expected.norm().clamp_min(1e-30))


def _mean(values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """What has no part for each sample: a mean over samples, or the same for all."""
    if values[0].is_floating_point() or values[0].is_complex():
        total = sum(sizes)
        return torch.stack([value * (size / total) for value, size in zip(values, sizes, strict=True)]).sum(0)
    if any(not torch.equal(value, values[0]) for value in values[1:]):
        raise ConfigurationError(
            f"{_RULE} a {values[0].dtype} of shape {tuple(values[0].shape)}, made by an earlier layer, differs between "
            f"them and has no dimension for samples. {_WAY_OUT}"
        )
    return values[0]
