"""Two stages per rank placed in a V: rank r runs stages r and 2 x ranks - 1 - r, so rank 0 has the first and the last.

The loss then arises on rank 0, and the turn at the last rank needs no transfer::

    stage 0 -> 1 -> 2 -> 3        chunk 0, downwards
    stage 7 <- 6 <- 5 <- 4        chunk 1, back up
    rank  0    1    2    3
"""

from __future__ import annotations

from collections import deque

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.core.instruction import Instruction, InstructionType, Orders

_F, _B = InstructionType.FORWARD, InstructionType.BACKWARD
_I, _W = InstructionType.INPUT_GRADIENT, InstructionType.WEIGHT_GRADIENT


class _ChunkWriter:
    """Writes the order of one rank; the microbatch of an instruction is the next one of its kind and chunk."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.order: list[Instruction] = []
        self.num_forwards = [0, 0]
        self._num_backwards = [0, 0]
        self._stages = (rank, 2 * num_ranks - 1 - rank)
        self._pending: deque[Instruction] = deque()

    def forward(self, chunk: int) -> None:
        self.order.append(Instruction(self._stages[chunk], _F, self.num_forwards[chunk]))
        self.num_forwards[chunk] += 1

    def backward(self, chunk: int, *, split: bool = False) -> None:
        """A full backward, or an input gradient that leaves its weight gradient pending."""
        stage, microbatch = self._stages[chunk], self._num_backwards[chunk]
        self.order.append(Instruction(stage, _I if split else _B, microbatch))
        if split:
            self._pending.append(Instruction(stage, _W, microbatch))
        self._num_backwards[chunk] += 1

    def weight(self, chunk: int | None = None) -> bool:
        """The oldest pending weight gradient, of `chunk` if given; False if there is none."""
        wanted = None if chunk is None else self._stages[chunk]
        found = next((inst for inst in self._pending if wanted in (None, inst.stage)), None)
        if found is None:
            return False
        self._pending.remove(found)
        self.order.append(found)
        return True


def zbv_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """ZB-V (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6): all backwards split, no bubble.

    Bubble-free only if F, I and W take equal times; peak memory is that of 1F1B. The pattern needs at least
    `2 x ranks - 1` microbatches; fewer are that pattern with the surplus left out.
    """
    count = max(2 * num_ranks - 1, num_microbatches)
    orders = []
    for rank in range(num_ranks):
        w = _ChunkWriter(rank, num_ranks)
        for _ in range(2 * (num_ranks - rank) - 1):  # warm-up: down the V, until the first microbatch comes back
            w.forward(0)
        for _ in range(rank):
            w.forward(1)
            w.forward(0)
        for _ in range(num_ranks - rank):
            w.forward(1)
            w.backward(1, split=True)
            w.weight(1)
        while w.num_forwards[1] < w.num_forwards[0] or w.num_forwards[0] < count:  # steady
            if w.num_forwards[0] < count:
                w.forward(0)
            w.backward(0, split=True)
            w.weight(0)
            w.forward(1)
            w.backward(1, split=True)
            w.weight(1)
        for _ in range(rank):  # cool-down: input gradients first, the others wait for them
            w.backward(0, split=True)
            w.backward(1, split=True)
        for _ in range(num_ranks - rank):
            w.backward(0, split=True)
            w.weight(0)
        for chunk in (1, 0):
            while w.weight(chunk):
                pass
        orders.append(tuple(inst for inst in w.order if inst.microbatch < num_microbatches))
    return tuple(orders)


def dualpipev_orders(num_ranks: int, num_microbatches: int) -> Orders:
    """DualPipeV: DeepSeek's DualPipe cut in half (DeepSeek-V3 report, 2024; github.com/deepseek-ai/DualPipe).

    In the steady state a forward of one chunk meets a full backward of the other. Torch marks those pairs as
    overlapped; here they follow each other, as torch executes them too.

    Raises:
        ConfigurationError: If there are fewer microbatches than stages.
    """
    if num_microbatches < 2 * num_ranks:
        raise ConfigurationError(
            f"dualpipev needs num_microbatches >= num_stages = 2 x num_ranks; got num_microbatches="
            f"{num_microbatches} for {num_ranks} ranks. Use num_microbatches={2 * num_ranks} or more."
        )
    orders = []
    for rank in range(num_ranks):
        behind = num_ranks - 1 - rank
        w = _ChunkWriter(rank, num_ranks)
        for _ in range(2 * behind):
            w.forward(0)
        for _ in range(rank + 1):
            w.forward(0)
            w.forward(1)
        for _ in range(behind):  # zero bubble: send the input gradient up before the weights
            w.backward(1, split=True)
            w.weight()
            w.forward(1)
        for _ in range(num_microbatches - 2 * num_ranks + rank + 1):  # steady
            w.forward(0)
            w.backward(1)
            w.forward(1)
            w.backward(0)
        for _ in range(behind):
            w.backward(1)
            w.forward(1)
            w.backward(0)
        for i in range(2 * (rank + 1)):  # the second half leaves its weight gradients for the end
            w.backward((i + 1) % 2, split=i > rank)
        for _ in range(behind):
            w.weight()
            w.backward(0, split=True)
        while w.weight():
            pass
        orders.append(tuple(w.order))
    return tuple(orders)
