"""A first batch is taken before training, of which training misses nothing."""

import io
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_pfo.strategy.step.first_batch import ahead
from lightning_pfo.strategy.step.first_batch.ahead import read_ahead
from tests.launch import of_ranks, run_script

pytestmark = pytest.mark.slow

CASES = (
    "augmented",
    "cannot be copied, but read again",
    "of its class",
    "of its class, within another",
    "of its class, read again",
    "iterator of its class",
    "own order",
    "stream",
    "stream with workers",
    "stream read by the first rank",
    "measured",
    "generator",
    "made by the model",
    "collated by the model",
    "batches",
    "next shard",
    "two streams",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ahead")
    run_script(Path(__file__).parents[2] / "scripts" / "ahead.py", folder)
    return of_ranks(folder, 2)


@pytest.mark.parametrize("case", CASES)
def test_training_sees_what_it_sees_on_one_device(ranks, case):
    expected = ranks[0][case]["one device"]
    assert len(expected) >= 6
    for rank in ranks:
        assert rank[case]["ranks"] == pytest.approx(expected, rel=2e-6)


class Stream(IterableDataset):
    def __init__(self, **attributes):
        self.read = 0
        self.__dict__.update(attributes)

    def __iter__(self):
        for _ in range(4):
            self.read += 1
            yield torch.tensor([self.read])


def first_of(loader, owners=()):
    with read_ahead(loader, [loader], owners) as source:
        return None if source is None else next(iter(source))


def test_a_copy_leaves_what_it_is_of():
    def collate(samples):
        return torch.stack(samples)

    data = torch.zeros(2**19)
    generator = torch.Generator().manual_seed(1)
    order = torch.rand(4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(Stream(data=data, random=generator), 2, collate_fn=collate)
    with read_ahead(loader, [loader], ()) as source:
        assert next(iter(source)).tolist() == [[1], [2]]
        assert source.dataset.data is data  # large
        assert torch.equal(torch.rand(4, generator=source.dataset.random), order)
    assert loader.dataset.read == 0
    assert torch.equal(torch.rand(4, generator=generator), order)


NOT_COPIED = [(letter for letter in "abc"), threading.Lock(), io.TextIOWrapper(io.BytesIO()), "the owner"]


@pytest.mark.parametrize("held", NOT_COPIED)
def test_what_cannot_be_copied_is_not_read_unless_it_has_an_index(held):
    owner = threading.Event()
    if held == "the owner":
        held = owner
    stream = Stream(held=held)
    assert first_of(DataLoader(stream, 2), (owner,)) is None
    assert stream.read == 0

    class WithIndex:
        def __init__(self, held):
            self.held, self.asked, self.random = held, 0, np.random.default_rng(0)

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.asked += 1
            return torch.tensor([self.asked + self.random.random()])

    dataset = WithIndex(held)
    loader = DataLoader(dataset, 2)
    once = first_of(loader, (owner,))
    assert dataset.asked == 0
    assert torch.equal(once, next(iter(loader)))


@pytest.mark.parametrize("limit", ["_MOST_OBJECTS", "_MOST_BYTES"])
def test_it_takes_no_copy_of_very_much(limit, monkeypatch):
    stream = Stream(samples=[str(number) for number in range(2000)])
    assert first_of(DataLoader(stream, 2)) is not None
    monkeypatch.setattr(ahead, limit, 1000)
    assert first_of(DataLoader(stream, 2)) is None
    assert stream.read == 0


def test_a_copy_that_its_class_refuses_is_none():
    class Refusing(Stream):
        def __reduce__(self):
            raise ValueError("not to be copied")

    assert first_of(DataLoader(Refusing(), 2)) is None


def test_owners_may_collate():
    class Owner:
        def __init__(self):
            self.collated = 0

        def collate(self, samples):
            self.collated += 1
            return torch.stack(samples)

    owner = Owner()
    assert first_of(DataLoader(Stream(), 2, collate_fn=owner.collate), (owner,)).tolist() == [[1], [2]]
    assert owner.collated == 0
