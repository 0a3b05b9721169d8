from collections import UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_pfo.strategy.step.effects.fresh import FreshBatches, anew, held, put, written

Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    names: list


def parts(batch):
    """Its tensor and its list of texts."""
    if isinstance(batch, Sample):
        return batch.x, batch.names
    found = list(batch.values()) if isinstance(batch, (dict, UserDict)) else list(batch)
    return found[0], found[1][0] if isinstance(found[1][0], list) else found[1]


def batches():
    x, texts = torch.zeros(2, 3), ["a", "b"]
    return [{"x": x, "n": texts}, [x, texts], (x, [texts]), Pair(x, texts), Sample(x, texts), UserDict(x=x, n=texts)]


@pytest.mark.parametrize("batch", batches(), ids=lambda batch: type(batch).__name__)
@pytest.mark.parametrize("copies", [False, True])
def test_containers_are_other_ones_and_tensors_are_copied_if_need_be(batch, copies):
    own = anew(batch, copies=copies)
    assert type(own) is type(batch)
    assert own is not batch
    (x, texts), (own_x, own_texts) = map(parts, (batch, own))
    assert (own_x is x) == (not copies)
    assert torch.equal(own_x, x)
    assert own_texts == texts
    assert own_texts is not texts


def test_arrays_are_copied_with_tensors():
    array = np.zeros(3)
    assert anew([array], copies=True)[0] is not array


def test_tensors_are_copied_once_a_step_has_written_into_them():
    fresh, seen = FreshBatches(), []

    def step(batch, writes):
        seen.append(batch[0])
        if writes:
            batch[0].add_(1)
            raise StopIteration  # as stages that are not the last

    x = torch.zeros(2)
    run = fresh.given_to("train", step, tells=False)
    run([x], False)
    run([x], False)
    assert seen[0] is not x
    assert seen[1] is x
    other = fresh.given_to("validate", step, tells=False)
    for _ in range(2):
        with pytest.raises(StopIteration):
            other([x], True)
    run([x], False)
    assert all(each is not x for each in seen[2:])
    assert x.tolist() == [0, 0]


@dataclass
class Item:
    x: torch.Tensor
    pred: torch.Tensor | None = None


def test_what_a_step_puts_into_a_batch_is_found_and_put_into_another():
    def batch():
        item = Item(torch.zeros(2))
        return {"x": torch.zeros(2), "pair": (torch.zeros(2), [torch.zeros(2)]), "item": item, "n": 1000, "kept": [1]}

    own, others = batch(), batch()
    before = held(own)
    assert list(written(own, before)) == []
    own["pred"] = torch.ones(2)
    own["n"] += 1
    own["pair"][0].add_(2)
    own["pair"][1][0] = torch.ones(2)
    own["item"].pred = torch.ones(2)
    found = dict(written(own, before))
    assert {"".join(str(name) for _, name in path) for path in found} == {"pred", "n", "pair0", "pair10", "itempred"}
    for path, value in found.items():
        put(others, path, value)
    assert others["n"] == 1001
    assert others["pair"][0].tolist() == [2, 2]
    for value in (others["pred"], others["pair"][1][0], others["item"].pred):
        assert value.tolist() == [1, 1]
    assert list(written(others, held(others))) == []


@pytest.mark.parametrize("inference", [False, True])
def test_what_is_written_into_a_batch_that_is_a_tensor(inference):
    own = torch.zeros(2)
    before = held(own)
    own.add_(1)
    ((path, value),) = written(own, before)
    with torch.inference_mode(inference):
        batch = torch.zeros(2)
    put(batch, path, value)
    assert batch.tolist() == [1, 1]


def test_a_mapping_that_makes_its_items_has_not_been_written_into():
    class Lazy(UserDict):
        def __getitem__(self, key):
            return super().__getitem__(key) + 1

    lazy = Lazy(x=torch.zeros(2))
    assert list(written(lazy, held(lazy))) == []


def test_tensors_in_long_lists_are_looked_at_and_texts_are_not():
    tensors, texts = [torch.zeros(1) for _ in range(1500)], ["a"] * 1500
    batch = [tensors, texts]
    before = held(batch)
    tensors[1400].add_(1)
    assert before.is_written_into(within=True)
    assert [path for path, _ in written(batch, before)] == [(("item", 0), ("item", 1400))]
    assert len(before.parts["item", 1].parts) == 0
