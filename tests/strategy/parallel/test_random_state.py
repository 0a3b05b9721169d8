import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

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


@given(st.lists(st.sampled_from(["normal", "uniform", "seed", "get", "set"]), max_size=12))
def test_numpy_s_state_is_what_numpy_says(operations):
    kept = random_state.get_state(CPU)  # hypothesis has seeded the generator
    for operation in operations:
        if operation == "normal":
            np.random.randn()
        elif operation == "uniform":
            np.random.rand()
        elif operation == "seed":
            np.random.seed(7)
        elif operation == "get":
            kept = random_state.get_state(CPU)
        else:
            random_state.set_state(kept, CPU)
        ours, theirs = random_state.get_state(CPU)["numpy"], np.random.get_state()
        assert ours[2:] == theirs[2:]
        assert (ours[1] == theirs[1]).all()


def test_another_kind_of_generator_is_captured_too():
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        state = random_state.get_state(CPU)
        expected = draw()
        random_state.set_state(state, CPU)
        assert draw() == expected
    finally:
        np.random.set_bit_generator(usual)


@pytest.mark.parametrize("drawn", [random.random, np.random.rand, np.random.randn])
def test_generators_of_the_host_are_seeded_once_somebody_draws_from_them(monkeypatch, drawn):
    monkeypatch.setattr(random_state, "_draws_on_host", False)
    with random_state.isolated(CPU):
        random_state.seed_step(CPU, 1)
        first = draw()
        random_state.seed_step(CPU, 1)
        second = draw()
        assert (second[0], second[1] == first[1], second[2] == first[2]) == (first[0], False, False)
        before = random_state.get_state(CPU)
        torch.rand(1)
        assert not random_state.notice_draws_on_host(before)
        drawn()
        assert random_state.notice_draws_on_host(before)
        assert not random_state.notice_draws_on_host(before)  # it is known now
        random_state.seed_step(CPU, 1)
        third = draw()
        random_state.seed_step(CPU, 1)
        assert draw() == third
