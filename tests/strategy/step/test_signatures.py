"""Signatures: microbatches of other shapes have others, wherever their tensors lie; values of tensors do not count."""

import functools
from collections import UserDict, deque
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence

from lightning_pfo.strategy.step.signatures import signature_of
from tests.strategy.objects import Callable, Own, Slots


class Stores:
    """A batch of graphs that keeps all in stores, and knows which of its methods to ask for what it has not."""

    def __init__(self, x):
        self.__dict__["_store"] = {"x": x, "parent": self}
        self.__dict__["num_graphs"] = 2

    def __getattr__(self, name):
        if name not in self._store:
            raise AttributeError(name)
        return self._store[name]

    def __getitem__(self, index):
        return self._store["x"][index]

    def __len__(self):
        return 2


class Graphs(Stores):
    """One that can be taken apart, as those of torch_geometric."""

    def to_dict(self):
        return {name: value for name, value in self._store.items() if value is not self}

    def to_data_list(self):
        return list(self._store["x"])

    @classmethod
    def from_data_list(cls, graphs):
        return cls(torch.stack(graphs))


class TensorDictLike(dict):
    batch_size = torch.Size([2])

    def to_dict(self):
        return dict(self)


def leading_back(x):
    inner = SimpleNamespace(x=x, ring=[])
    inner.ring.append(SimpleNamespace(ring=inner))
    return SimpleNamespace(inner=inner)


HOLDERS = {
    "itself": lambda x: x,
    "a list": lambda x: [x],
    "a dict": lambda x: {"x": x},
    "a UserDict": lambda x: UserDict(x=x),
    "an object": lambda x: Own(x=x),
    "an object in an object": lambda x: Own(x=Own(x=x)),
    "a dict in a list in an object": lambda x: Own(x=[{"x": x}]),
    "slots": Slots,
    "what can be called": lambda x: Callable(x=x),
    "what can be called, in an object": lambda x: Own(x=Callable(x=x)),
    "a partial function": lambda x: functools.partial(torch.add, x),
    "a deque": lambda x: deque([x]),
    "an object that leads back": leading_back,
    "a batch with stores": Stores,
    "a batch of graphs": Graphs,
    "a TensorDict": lambda x: TensorDictLike(x=x),
}


@pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS)
def test_shapes_and_types_are_told_apart_whatever_holds_them(make):
    for same in (torch.zeros(2, 3), torch.ones(2, 3)):
        assert signature_of(make(same)) == signature_of(make(torch.zeros(2, 3)))
    for other in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3, requires_grad=True)):
        assert signature_of(make(other)) != signature_of(make(torch.zeros(2, 3)))


def packed(*lengths, in_order=True):
    return pack_sequence([torch.zeros(length, 2) for length in lengths], enforce_sorted=in_order)


def nested(*lengths, layout=torch.strided):
    return torch.nested.nested_tensor([torch.randn(length, 2) for length in lengths], layout=layout)


def sparse(*values, layout=torch.sparse_coo):
    return torch.tensor([values]).to_sparse(layout=layout)


KINDS = {
    "arrays": [np.zeros((2, 3)), np.zeros((2, 4)), np.zeros((2, 3), dtype=np.float32), np.zeros((2, 3), dtype=object)],
    "packed": [
        packed(3, 1),
        packed(2, 2),
        packed(3, 1, 1),
        *(packed(*two, in_order=False) for two in [(3, 1), (1, 3)]),
    ],
    "nested": [nested(3, 1), nested(2, 2), nested(1, 3), nested(3, 1, layout=torch.jagged)],
    "jagged": [nested(3, 1, layout=torch.jagged), nested(2, 2, layout=torch.jagged)],
    "sparse": [sparse(1, 0), sparse(1, 1), sparse(1, 0, 0), torch.tensor([[1, 0]])],
    "csr": [sparse(1.0, 0.0, layout=torch.sparse_csr), sparse(1.0, 1.0, layout=torch.sparse_csr), sparse(1.0, 0.0)],
    "tables": [
        pandas.DataFrame({"a": [1, 2]}),
        pandas.DataFrame({"a": [1]}),
        pandas.DataFrame({"b": [1, 2]}),
        pandas.DataFrame({"a": [1.0, 2.0]}),
        pandas.DataFrame({"a": [1, 2], "b": [1, 2]}),
    ],
    "columns": [pandas.Series([1, 2]), pandas.Series([1]), pandas.Series([1.0, 2.0]), pandas.DataFrame({0: [1, 2]})],
    "images": [Image.new("RGB", (4, 3)), Image.new("RGB", (3, 4)), Image.new("L", (4, 3))],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize(
    "make",
    [
        lambda value: {"a": value},
        lambda value: Own(x=value),
        lambda value: Own(x=Own(x=[value])),
        lambda value: Callable(x=value),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_other_forms_of_a_kind_are_told_apart(kind, make):
    values = KINDS[kind]
    assert len({signature_of((torch.zeros(2), make(value))) for value in values}) == len(values)


def test_flags_are_told_apart():
    assert len({signature_of({"flag": value}) for value in (True, False, None, 1, "True")}) == 5


def test_values_do_not_count():
    def batch(number):
        table = pandas.DataFrame({"a": [number, 2]})
        image = Image.new("L", (2, 2), number)
        return {"n": number, "text": str(number), "table": table, "image": image, "array": np.array([number])}

    assert signature_of(batch(1)) == signature_of(batch(2))
    assert signature_of(packed(3, 1)) == signature_of(packed(3, 1))
    assert signature_of(nested(3, 1, layout=torch.jagged)) == signature_of(nested(3, 1, layout=torch.jagged))
