"""Batches that several loaders give side by side: each part has samples of its own, and not as many as the others.

Such a batch goes into as many microbatches as divide all of its parts into equal ones. So each microbatch has the same
share of each part, and the mean of its losses is that of the batch, however the step puts parts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from lightning_pfo.core.errors import BatchError
from lightning_pfo.core.wording import counted
from lightning_pfo.strategy.step.batches.notices import warn_once
from lightning_pfo.strategy.step.batches.splitting import Microbatches, batch_size_of, first_samples, split_batch
from lightning_pfo.strategy.step.batches.structures import Parts, parts_of


@dataclass(frozen=True)
class SideBySide:
    """A batch whose parts have other sizes than one another.

    Attributes:
        parts: How it is taken apart.
        sizes: How many samples each part has; None: a loader has ended, and gives None.
        batch_dim: The dimension along which tensors have samples.
    """

    parts: Parts
    sizes: tuple[int | None, ...]
    batch_dim: int

    @property
    def size(self) -> int:
        """That of the first part, which Lightning takes for the size of the batch too."""
        return next(size for size in self.sizes if size is not None)

    def split(self, num_microbatches: int) -> Microbatches:
        """Divide it into so many microbatches, or as many as all parts can be divided into equally."""
        common = gcd(*(size for size in self.sizes if size is not None))
        number = next(number for number in range(num_microbatches, 0, -1) if common % number == 0)
        if number < num_microbatches:
            sizes = " and ".join(f"batch{n} {s}" for n, s in zip(self.parts.names, self.sizes, strict=True) if s)
            warn_once(
                f"Loaders have given batches of several sizes side by side ({sizes} samples), which are "
                f"divided into {counted(number, 'microbatch', 'microbatches')} in place of {num_microbatches}, so that "
                f"each has its share of all: ranks wait for each other meanwhile. Batches whose sizes "
                f"{num_microbatches} divides, and drop_last=True, do without."
            )
        divided = [
            (value,) * number if size is None else split_batch(value, number, batch_dim=self.batch_dim).parts
            for value, size in zip(self.parts.values, self.sizes, strict=True)
        ]
        rebuilt = tuple(self.parts.rebuild(list(of_one)) for of_one in zip(*divided, strict=True))
        return Microbatches(rebuilt, (self.size // number,) * number)

    def first(self, number: int) -> Any:
        """What goes with the first samples of the first part, as one batch."""
        return self.parts.rebuild(
            [
                value if size is None else first_samples(value, number * size // self.size, self.batch_dim)
                for value, size in zip(self.parts.values, self.sizes, strict=True)
            ]
        )


def side_by_side(batch: Any, batch_dim: int) -> SideBySide | None:
    """A batch of several loaders, if its parts have other sizes than one another; None if it is as any other."""
    parts = parts_of(batch)
    if parts is None:
        return None
    try:
        sizes = tuple(None if value is None else batch_size_of(value, batch_dim) for value in parts.values)
    except BatchError:  # what reads the whole batch may know better, or says what is wrong
        return None
    return SideBySide(parts, sizes, batch_dim) if len(set(sizes) - {None}) > 1 else None
