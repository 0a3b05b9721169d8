import random

import numpy as np
import torch

from lightning_pfo.strategy.parallel import random_state

CPU = torch.device("cpu")


def draw():
    return torch.rand(1).item(), random.random(), np.random.rand()


def test_a_block_leaves_the_generators_as_they_were():
    state = random_state.get_state(CPU)
    expected = draw()
    random_state.set_state(state, CPU)
    with random_state.isolated(CPU):
        random_state.seed(CPU, 1, 2, 3)
        draw()
    assert draw() == expected


def test_seeds_depend_on_every_part():
    seen = set()
    for parts in ((1, 2, 3), (1, 3, 2), (1, 2, 4), (12, 3)):
        with random_state.isolated(CPU):
            random_state.seed(CPU, *parts)
            first = draw()
            random_state.seed(CPU, *parts)
            assert draw() == first
            seen.add(first)
    assert len(seen) == 4
