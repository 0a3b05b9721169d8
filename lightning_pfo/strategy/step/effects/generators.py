"""Random generators of the user's own, in attributes: `self.rng.random()`, `torch.rand(3, generator=self.generator)`.

Stages that end a step early draw less of them, and a rank of several stages draws more, so the ranks would go on with
other numbers. Hence all stages run a microbatch with the same numbers: the first one with those that come next, each
further one with numbers of its own. If the step draws any, the next batch has others, the same on every rank.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch

from lightning_pfo.strategy.model.reach.places import Path, set_state, state_of

_NEXT = -1


class Generators:
    """Those that a module has at the begin of a batch.

    Args:
        found: The generators, by their places.
    """

    def __init__(self, found: Mapping[Path, Any]) -> None:
        self._found = found
        self._begin = {path: state_of(generator) for path, generator in found.items()}
        self._entered: dict[Path, bytes] = {}
        self._drawn: dict[Path, Any] = {}

    def draw_others(self, number: int) -> None:
        """Begin with other numbers, not to be put back; 0: with those that are there."""
        for path, generator in self._found.items() if number else ():
            self._seed(path, _NEXT - number)
            self._begin[path] = state_of(generator)

    def enter(self, index: int) -> None:
        """A run of the step on a microbatch begins."""
        for path, generator in self._found.items():
            if index:
                self._seed(path, index)
            self._entered[path] = _bytes_of(state_of(generator))

    def leave(self, *, has_ended: bool) -> None:
        """It is over; `has_ended` if it has run to the end of the step, so that it counts what it has drawn."""
        for path, generator in self._found.items():
            if has_ended and _bytes_of(state_of(generator)) != self._entered[path]:
                self._drawn[path] = state_of(generator)
            set_state(generator, self._begin[path])

    def drawn(self) -> list[Path]:
        """Those of which the step has drawn numbers."""
        return [path for path in self._found if path in self._drawn]

    def apply(self, drawn: Collection[Path], *, as_drawn: bool) -> None:
        """Let them go on after the batch.

        Args:
            drawn: Those of which the step has drawn.
            as_drawn: Whether they go on from there, where there was one microbatch and no other rank has to know.
        """
        for path in drawn:
            if as_drawn:
                set_state(self._found[path], self._drawn[path])
            elif path in self._found:
                self._seed(path, _NEXT)

    def _seed(self, path: Path, index: int) -> None:
        digest = hashlib.blake2b(_bytes_of(self._begin[path]) + str(index).encode(), digest_size=8).digest()
        generator, seed = self._found[path], int.from_bytes(digest, "little") >> 1
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            bits: Any = generator.bit_generator
            bits.state = type(bits)(seed).state
        else:
            generator.seed(seed & 0xFFFFFFFF)


def _bytes_of(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)
