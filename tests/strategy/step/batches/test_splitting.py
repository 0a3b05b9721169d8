"""Splitting: every kind of batch, sizes that differ by one at most, and a user's own way."""

import logging
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils._pytree import tree_leaves

from lightning_pfo.core.errors import BatchError
from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.reading import Known
from lightning_pfo.strategy.step.batches.splitting import (
    Microbatches,
    batch_size_of,
    even_sizes,
    first_samples,
    split_batch,
)

X = torch.arange(8).reshape(4, 2)
Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Sample:
    x: torch.Tensor
    name: str = "all"


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    double: torch.Tensor = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "double", 2 * self.x)


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor


class Attributes(dict):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class OwnMapping(Mapping):
    def __init__(self, items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


class Indexed:
    """Knows slices, and its length."""

    def __init__(self, x, names):
        self.x, self.names = x, names

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return Indexed(self.x[index], self.names[index])


class ByNumber:
    """Knows single items only, as images of different sizes in one padded tensor."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __len__(self):
        return len(self.tensor)

    def __getitem__(self, index: int):
        return self.tensor[index][: index + 1]


@pytest.mark.parametrize(
    ("batch", "x_of"),
    [
        (X, lambda part: part),
        ([X, X + 1], lambda part: part[1] - 1),
        ((X, [X, (X,)]), lambda part: part[1][1][0]),
        ({"x": X}, lambda part: part["x"]),
        (OrderedDict(x=X), lambda part: part["x"]),
        (defaultdict(list, x=X), lambda part: part["x"]),
        (UserDict(x=X), lambda part: part["x"]),
        (MappingProxyType({"x": X}), lambda part: part["x"]),
        (OwnMapping({"x": X}), lambda part: part["x"]),
        (Attributes(x=X), lambda part: part["x"]),
        (Attributes(x=X), lambda part: part.x),
        (Pair(X, [X + 1]), lambda part: part.y[0] - 1),
        (Sample(X), lambda part: part.x),
        (Frozen(X), lambda part: part.double // 2),
        (Slotted(X), lambda part: part.x),
        (Indexed(X, list("abcd")), lambda part: part.x),
        (SimpleNamespace(x=X, number=4), lambda part: part.x),
        ({"x": X, "own": SimpleNamespace(x=X)}, lambda part: part["own"].x),
        ({"x": X, "own": ByNumber(X)}, lambda part: part["own"].tensor),
        (torch.return_types.max((X, X)), lambda part: part[1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_type_and_are_left_as_they_were(batch, x_of):
    parts = split_batch(batch, 2).parts
    assert all(type(part) is type(batch) for part in parts)
    assert [x_of(part).tolist() for part in parts] == [X[:2].tolist(), X[2:].tolist()]
    assert x_of(batch).tolist() == X.tolist()


@pytest.mark.parametrize(
    ("values", "second"),
    [
        (["a", "b", "c", "d"], ["c", "d"]),
        (("a", "b", "c", "d"), ("c", "d")),
        ([1, 2.0, None, True], [None, True]),
        ([{"a": 1}, {"a": 2}, {}, {"a": 4}], [{}, {"a": 4}]),
        ([["a"], [], ["b", "c"], ["d"]], [["b", "c"], ["d"]]),
        ({"names": ["a", "b", "c", "d"]}, {"names": ["c", "d"]}),
        ([["a", "b", "c", "d"], ["e", "f", "g", "h"]], [["c", "d"], ["g", "h"]]),
        (range(4), range(2, 4)),
        ("text", "text"),
        (["a", "b", "c"], ["a", "b", "c"]),
        (None, None),
        (3, 3),
        (torch.Size([4, 3, 2, 1]), torch.Size([4, 3, 2, 1])),
        (np.str_("text"), np.str_("text")),
        (b"text", b"text"),
        (deque("abcd"), ["c", "d"]),
        (Pair(1, 2), Pair(1, 2)),
    ],
)
def test_values_beside_tensors_stay_beside_their_samples(values, second):
    assert split_batch({"x": X, "values": values}, 2)[1]["values"] == second


def test_what_is_no_sample_is_given_to_all():
    scale, owner = torch.tensor(7.0), torch.nn.Linear(4, 4)
    for part in split_batch({"x": X, "scale": scale, "model": owner, "n": np.float64(2), "type": Sample}, 2):
        assert part["scale"] is scale
        assert part["model"] is owner
        assert part["n"] == 2
        assert part["type"] is Sample


def test_tensors_are_views_and_keep_their_graph():
    x = torch.ones(4, 2, requires_grad=True)
    first, second = split_batch(x * 2, 2)
    assert first._base is second._base
    second.sum().backward()
    assert x.grad.tolist() == [[0, 0], [0, 0], [2, 2], [2, 2]]


def test_a_microbatch_that_is_changed_in_place_spoils_no_backward_of_another():
    weight, ids = torch.ones(3, 2, requires_grad=True), torch.tensor([0, -100, 2, -100])
    microbatches = split_batch(ids, 2)
    losses = [torch.nn.functional.embedding(each.masked_fill_(each == -100, 1), weight).sum() for each in microbatches]
    sum(losses).backward()
    assert weight.grad.tolist() == [[1, 1], [2, 2], [1, 1]]


def test_arrays_are_split_too():
    objects = np.array([{"a": 1}, None, "c", "d"], dtype=object)
    part = split_batch({"x": X.numpy(), "objects": objects}, 2)[1]
    assert part["x"].tolist() == X[2:].tolist()
    assert part["objects"].tolist() == ["c", "d"]


def test_packed_sequences_are_split_by_sequences():
    sequences = [torch.randn(length, 2) for length in (2, 5, 1, 3)]
    parts = split_batch((pack_sequence(sequences, enforce_sorted=False), torch.zeros(4)), 2)
    found = [sequence for part in parts for sequence in unpack_sequence(part[0])]
    assert all(torch.equal(one, other) for one, other in zip(found, sequences, strict=True))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_are_split_by_their_tensors(layout):
    rows = [torch.randn(length, 2) for length in (2, 5, 1, 3)]
    parts = split_batch((torch.nested.nested_tensor(rows, layout=layout), torch.zeros(4)), 3)
    assert [part[0].size(0) for part in parts] == [2, 1, 1]
    assert all(part[0].layout == layout for part in parts)
    found = [row for part in parts for row in part[0].unbind()]
    assert all(torch.equal(one, other) for one, other in zip(found, rows, strict=True))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_stay_sparse(layout):
    parts = split_batch((X.float().to_sparse(layout=layout), X), 2)
    assert [part[0].layout for part in parts] == [layout] * 2
    assert torch.cat([part[0].to_dense() for part in parts]).tolist() == X.tolist()


def test_tensors_of_other_classes_keep_class_and_attributes():
    class Boxes(torch.Tensor):
        pass

    boxes = X.as_subclass(Boxes)
    boxes.format = "xyxy"
    part = split_batch(boxes, 2)[1]
    assert type(part) is Boxes
    assert part.format == "xyxy"
    assert part.tolist() == X[2:].tolist()


class Graphs:
    """The interface of torch_geometric.data.Batch, whose slices are lists of graphs."""

    def __init__(self, sizes):
        self.sizes, self.x, self.num_graphs = sizes, torch.zeros(sum(sizes), 1), len(sizes)

    def to_data_list(self):
        return list(self.sizes)

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)


def test_batches_of_graphs_are_split_by_graphs():
    parts = split_batch((Graphs([3, 1, 2]), torch.zeros(3)), 2)
    assert [part[0].sizes for part in parts] == [[3, 1], [2]]
    assert batch_size_of(Graphs([3, 1, 2])) == 3


class TensorDictLike(dict):
    """The interface of tensordict.TensorDict: a mapping that is indexed by samples, and says which dimensions."""

    def __init__(self, items, size):
        super().__init__(items)
        self.batch_size = torch.Size([size])

    def __getitem__(self, index):
        if isinstance(index, str):
            return super().__getitem__(index)
        taken = {key: value[index] for key, value in self.items()}
        return TensorDictLike(taken, len(taken["x"]))


def test_tensor_dicts_are_indexed_by_samples():
    parts = split_batch(TensorDictLike({"x": X}, 4), 2)
    assert [part.batch_size for part in parts] == [torch.Size([2])] * 2
    assert parts[1]["x"].tolist() == X[2:].tolist()


def test_encodings_of_a_tokenizer_stay_beside_their_texts():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": X, "length": [1, 2, 3, 4]}, encoding=list("abcd"), n_sequences=1)
    part = split_batch(batch, 2)[1]
    assert type(part) is transformers.BatchEncoding
    assert part.input_ids.tolist() == X[2:].tolist()
    assert (part["length"], part.encodings) == ([3, 4], ["c", "d"])
    assert batch.encodings == list("abcd")


def test_outputs_of_transformers_are_batches_too():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    batch = outputs.CausalLMOutput(logits=X, hidden_states=(X, X + 1))
    part = split_batch(batch, 2)[1]
    assert type(part) is type(batch)
    assert part.logits.tolist() == part["logits"].tolist() == X[2:].tolist()
    assert part.hidden_states[1].tolist() == (X[2:] + 1).tolist()
    assert part.attentions is None


def test_time_major_batches_are_split_along_their_second_dimension():
    batch = {"x": torch.arange(24).reshape(3, 4, 2), "lengths": torch.arange(4), "y": np.arange(12).reshape(3, 4)}
    parts = split_batch(batch, 3, batch_dim=1)
    assert parts.sizes == (2, 1, 1)
    assert parts[1]["x"].tolist() == batch["x"][:, 2:3].tolist()
    assert parts[1]["lengths"].tolist() == [2]
    assert parts[1]["y"].tolist() == batch["y"][:, 2:3].tolist()
    with pytest.raises(BatchError, match="batch_dim counts dimensions from the first, 0, on; got -1"):
        split_batch(batch, 3, batch_dim=-1)


@given(st.integers(1, 200), st.integers(1, 40))
def test_sizes_differ_by_one_at_most_with_larger_ones_first(size, number):
    sizes = even_sizes(size, number)
    assert sum(sizes) == size
    assert len(sizes) == min(size, number)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def structures(size):
    """Batches with leaves of `size` samples, numbered."""
    shapes = st.lists(st.integers(1, 3), max_size=2)
    tensors = shapes.map(lambda shape: torch.arange(size).reshape(size, *[1] * len(shape)).expand(size, *shape))
    lists = st.sampled_from([[f"sample {i}" for i in range(size)], [{"id": i} for i in range(size)]])
    leaves = st.one_of(tensors, tensors.map(torch.Tensor.numpy), lists)

    def larger(parts):
        return st.one_of(
            st.dictionaries(st.text(max_size=2), parts, max_size=3),
            st.tuples(parts, parts.map(lambda part: {"in": part})),
            st.builds(Pair, tensors, parts),
            st.builds(Sample, tensors),
        )

    return st.tuples(tensors, st.one_of(leaves, larger(st.one_of(leaves, larger(leaves)))))


def same(one, other):
    if isinstance(one, (torch.Tensor, np.ndarray)):
        return type(one) is type(other) and one.tolist() == other.tolist()
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return same(vars(one), vars(other)) if isinstance(one, Sample) else one == other


@given(st.data(), st.integers(3, 9), st.integers(1, 10))
def test_splitting_and_merging_gives_the_batch_back(data, size, number):
    batch = data.draw(structures(size))
    parts = split_batch(batch, number)
    assert parts.sizes == even_sizes(size, number)
    assert parts.size == batch_size_of(batch) == size
    assert [len(part[0]) for part in parts] == list(parts.sizes)
    assert [type(leaf) for leaf in tree_leaves(parts[0][0])] == [torch.Tensor]
    assert same(merge_outputs(parts.parts, parts.sizes), batch)


@given(st.data(), st.integers(3, 9), st.integers(1, 3))
def test_first_samples_are_those_of_the_first_microbatches(data, size, number):
    batch = data.draw(structures(size))
    joined = merge_outputs([first_samples(batch, number), split_batch(batch, 1)[0]], (number, size))
    assert joined[0][:number].tolist() == joined[0][number : 2 * number].tolist()
    assert len(joined[0]) == number + size


def test_objects_with_other_tensors_too_are_given_whole_and_said(caplog):
    class Graph:
        def __init__(self):
            self.x, self.edges = X, torch.zeros(2, 9)

    graph = Graph()
    with caplog.at_level(logging.WARNING):
        parts = split_batch({"x": X, "graph": graph}, 2)
        split_batch({"x": X, "graph": Graph()}, 2)
    assert all(part["graph"] is graph for part in parts)
    assert len(caplog.records) == 1
    assert "batch['graph'] is a Graph" in caplog.text


def test_a_batch_that_contains_itself_ends():
    batch = {"x": X}
    batch["self"] = batch
    assert split_batch(batch, 2)[1]["x"].tolist() == X[2:].tolist()


def test_mappings_that_cannot_be_made_are_refused_by_name():
    class Needs(OwnMapping):
        def __init__(self, items, more):
            super().__init__(items)

    with pytest.raises(BatchError, match=r"made anew from its items, by Needs\(dict\).*TypeError.*split_batch="):
        split_batch(Needs({"x": X}, 1), 2)


def test_one_microbatch_takes_anything():
    batch = {"x": torch.zeros(3), "y": torch.zeros(4)}
    assert split_batch(batch, 1) == Microbatches((batch,), (1,))
    assert split_batch(X, 1).sizes == (4,)


def test_no_microbatch_is_refused():
    with pytest.raises(BatchError, match="got num_microbatches=0"):
        split_batch(X, 0)


# ---- a user's own way ----


def test_a_users_own_way_is_taken():
    parts = split_batch({"n": 6}, 3, split=lambda batch, number: [torch.zeros(size) for size in (3, 2, 1)])
    assert parts.sizes == (3, 2, 1)
    parts = split_batch({"n": 2}, 3, split=lambda batch, number: ["opaque", "opaque"])
    assert parts.sizes == (1, 1)
    parts = split_batch("b", 2, split=lambda batch, number: Microbatches((batch, batch), (5, 4)))
    assert parts.sizes == (5, 4)


def test_own_ways_that_fail_are_named():
    def by_hand(batch, number):
        return batch.halves

    with pytest.raises(BatchError, match=r"by_hand raised AttributeError: .*halves.* called with a dict and num_micro"):
        split_batch({}, 2, split=by_hand)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], "2 microbatches, or fewer of a smaller batch; got 0"),
        ([X, X, X], "got 3"),
        ({"x": X}, "a list or tuple of microbatches; got a dict"),
        (X, "got a Tensor"),
        (Microbatches((X, X), (1,)), "got 2 and 1 sizes"),
    ],
)
def test_own_ways_that_give_something_else_are_refused(found, said):
    with pytest.raises(BatchError, match=said):
        split_batch(X, 2, split=lambda batch, number: found)


def test_microbatches_are_a_sequence():
    parts = split_batch(X, 3)
    assert len(parts) == 3
    assert parts[:2].sizes == (2, 1)
    assert [len(part) for part in parts] == [2, 1, 1]


def test_a_list_of_another_length_than_earlier_batches_is_none_of_samples_later():
    def batch(size):
        views = [torch.zeros(size, 3), torch.ones(size, 3), torch.ones(size, 3)]
        return {"views": views, "height and width": (3.0, 4.0), "ids": [*range(size)]}

    known = Known()
    assert split_batch(batch(8), 4, known=known)[0]["height and width"] == (3.0, 4.0)
    first, second = split_batch(batch(2), 4, known=known)
    assert first["height and width"] == second["height and width"] == (3.0, 4.0)
    assert (first["ids"], second["ids"]) == ([0], [1])
    assert [len(view) for view in first["views"]] == [1, 1, 1]
    assert first_samples(batch(2), 1, known=known)["height and width"] == (3.0, 4.0)
    assert split_batch(batch(2), 4)[0]["height and width"] == (3.0,)  # nothing is known then


def test_a_list_of_samples_is_one_in_a_later_batch_of_as_many_as_they_have_rows():
    def batch(size):
        texts = [torch.arange(4 + 3 * row).reshape(-1, 1)[:4] for row in range(size)]  # each has 4 rows
        return texts, ["no text"] * size

    known = Known()
    assert len(split_batch(batch(6), 2, known=known)[0][0]) == 3
    texts, said = split_batch(batch(4), 2, known=known)[1]
    assert [text.shape for text in texts] == [(4, 1), (4, 1)]
    assert len(said) == 2


def test_images_beside_boxes_are_samples_though_they_have_as_many_channels():
    images = tuple(torch.zeros(3, height, 5) for height in (4, 6, 5))
    boxes = tuple({"boxes": torch.zeros(number, 4)} for number in (1, 2, 0))
    for index, (images_of, boxes_of) in enumerate(split_batch((images, boxes), 3)):
        assert [image.shape for image in images_of] == [images[index].shape]
        assert boxes_of[0]["boxes"].shape == boxes[index]["boxes"].shape
