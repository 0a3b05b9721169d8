"""Merging what a step returned for each microbatch into what one device returns for the batch."""

import logging
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

from lightning_pfo.strategy.step.batches.merging import merge_outputs
from lightning_pfo.strategy.step.batches.splitting import split_batch

Scores = namedtuple("Scores", ["best", "names"])


@dataclass(frozen=True)
class Prediction:
    label: torch.Tensor
    text: list


@pytest.mark.parametrize("sizes", [(2, 2), None])
def test_lists_of_texts_come_back_whole(sizes):
    assert merge_outputs([["a", "b"], ["c", "d"]], sizes) == ["a", "b", "c", "d"]


PREDICTIONS = {
    "tensor": lambda batch: batch["x"] * 2,
    "array": lambda batch: batch["x"].numpy(),
    "texts": lambda batch: [name.upper() for name in batch["names"]],
    "tuple of texts": lambda batch: tuple(batch["names"]),
    "scores": lambda batch: batch["x"][:, 0].tolist(),
    "rows": lambda batch: batch["x"].tolist(),
    "arrays": lambda batch: list(np.tile(batch["x"].numpy(), 3)),
    "zero-dimensional": lambda batch: list(batch["x"][:, 0]),
    "dicts": lambda batch: [{"name": name, "x": x} for name, x in zip(batch["names"], batch["x"], strict=True)],
    "of various sizes": lambda batch: [torch.ones(int(row[0]) + 1) for row in batch["x"]],
    "boxes": lambda batch: [{"boxes": torch.ones(int(row[0]), 4), "id": int(row[0])} for row in batch["x"]],
    "any number": lambda batch: [int(row[0]) for row in batch["x"] if row[0] % 3],
    "flat": lambda batch: batch["x"].flatten(),
    "pair": lambda batch: (batch["x"], batch["names"]),
    "columns": lambda batch: (list(batch["names"]), {"rows": batch["x"].tolist()}),
    "columns beside nothing": lambda batch: ({"in": {}}, {"names": list(batch["names"])}),
    "dict": lambda batch: {"logits": batch["x"], "names": batch["names"], "step": 7, "lr": 0.1, "by": "me", "n": None},
    "namedtuple": lambda batch: Scores(batch["x"].amax(1), batch["names"]),
    "dataclass": lambda batch: Prediction(batch["x"], batch["names"]),
    "by name": lambda batch: dict(zip(batch["names"], batch["x"].tolist(), strict=True)),
    "number of samples": lambda batch: len(batch["x"]),
    "count": lambda batch: (batch["x"][:, 0] > 2).sum(),
    "count as a number": lambda batch: int(batch["x"].square().sum()),
    "count of numpy": lambda batch: (batch["x"][:, 0].numpy() >= 0).sum(),
    "mean": lambda batch: batch["x"].float().mean(),
    "mean as a number": lambda batch: float(batch["x"].float().mean()),
    "mean of numpy": lambda batch: batch["x"].numpy().mean(),
    "metrics": lambda batch: (float(batch["x"].float().mean()), batch["x"].float().mean(dim=0).sum()),
    "setting": lambda batch: ["cat", "dog", "bird", "fish", "bee", "ant", "fox"],
    "set": lambda batch: set(batch["names"]),
    "nothing": lambda batch: None,
    "hidden states": lambda batch: (batch["x"], batch["x"] + 1),
}


def plain(value):
    """Values in a form that compares, to rounding."""
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return type(value).__name__, plain(value.tolist())
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Prediction):
        return plain(vars(value))
    return type(value), [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", PREDICTIONS)
@pytest.mark.parametrize(("size", "number"), [(4, 2), (6, 2), (7, 3), (5, 4), (5, 5), (5, 1)])
def test_merged_outputs_are_those_of_one_device(name, size, number):
    predict = PREDICTIONS[name]
    batch = {"x": torch.arange(3 * size).reshape(size, 3) % 7, "names": [f"name {i}" for i in range(size)]}
    parts = split_batch(batch, number)
    assert plain(merge_outputs([predict(part) for part in parts], parts.sizes)) == plain(predict(batch))


def test_packed_sequences_are_joined():
    sequences = [torch.randn(length, 2) for length in (2, 5, 1)]
    outputs = [pack_sequence(some, enforce_sorted=False) for some in (sequences[:2], sequences[2:])]
    merged = unpack_sequence(merge_outputs(outputs, (2, 1)))
    assert all(torch.equal(one, other) for one, other in zip(merged, sequences, strict=True))


def test_tables_are_split_and_joined_by_rows():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": [1, 2, 3], "name": list("xyz")}, index=[7, 8, 9])
    parts = split_batch({"x": torch.zeros(3), "table": table, "column": table["a"]}, 2)
    assert [list(part["table"].name) for part in parts] == [["x", "y"], ["z"]]
    assert merge_outputs(parts.parts, parts.sizes)["table"].equals(table)
    made = [pandas.DataFrame({"a": part["column"].to_list()}) for part in parts]  # rows 0, 1 and 0
    assert merge_outputs(made, parts.sizes).equals(pandas.DataFrame({"a": [1, 2, 3]}))


def test_time_major_tensors_are_joined_along_their_second_dimension():
    x = torch.arange(24).reshape(3, 4, 2)
    parts = split_batch(x, 3, batch_dim=1)
    assert merge_outputs(parts.parts, parts.sizes, batch_dim=1).tolist() == x.tolist()


def test_outputs_of_transformers_keep_their_type():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    x = torch.arange(6.0).reshape(3, 2)
    parts = [outputs.CausalLMOutput(loss=part.mean(), logits=part, hidden_states=(part,)) for part in (x[:2], x[2:])]
    merged = merge_outputs(parts, (2, 1))
    assert type(merged) is outputs.CausalLMOutput
    assert float(merged.loss) == 2.5
    assert merged.logits.tolist() == merged.hidden_states[0].tolist() == x.tolist()


def test_means_have_the_weights_of_microbatches():
    losses = [torch.tensor(1.0), torch.tensor(4.0)]
    assert float(merge_outputs(losses)) == 2.5
    assert float(merge_outputs(losses, (2, 1))) == 2.0
    assert float(merge_outputs(losses, (2, 1), (0.25, 0.75))) == 3.25
    assert float(merge_outputs(losses, (2, 1), (1, 1))) == 5.0  # a sum
    assert merge_outputs([0.5, 0.5], (2, 1), (1, 1)) == 1.0
    assert merge_outputs([1, 2.5], (1, 1)) == 1.75
    assert merge_outputs(losses, (2, 1)).dtype == torch.float32


def test_microbatches_without_weight_leave_no_nan():
    assert float(merge_outputs([torch.tensor(2.0), torch.tensor(torch.nan)], (1, 1), (1.0, 0.0))) == 2.0
    assert merge_outputs([2.0, float("nan")], (1, 1), (1.0, 0.0)) == 2.0


def test_what_only_some_microbatches_return_is_there():
    first, second = {"a": 1.0, "hits": torch.ones(2)}, {"a": 3.0}
    merged = merge_outputs([first, second], (2, 2))
    assert (merged["a"], merged["hits"].tolist()) == (2.0, [1, 1])
    assert merge_outputs([None, torch.ones(2), None], (2, 2, 2)).tolist() == [1, 1]
    assert merge_outputs([None, 3.0, 5.0], (2, 2, 2)) == 4.0


def test_lists_of_layers_are_structure():
    layers = [[torch.ones(2, 3) * part, torch.zeros(2, 3)] for part in (0, 1)]
    assert [layer[:, 0].tolist() for layer in merge_outputs(layers, (2, 2))] == [[0, 0, 1, 1], [0, 0, 0, 0]]
    norms = [[torch.tensor(1.0 + part), torch.tensor(3.0), torch.tensor(5.0)] for part in (0, 1)]
    assert [float(norm) for norm in merge_outputs(norms, (2, 2))] == [1.5, 3.0, 5.0]


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        (["first", "second"], "output, a str that differs"),
        ([True, False], "output, a bool that differs"),
        ([torch.tensor(True), torch.tensor(False)], "output, a Tensor that differs"),
        (
            [torch.zeros(2, 3), torch.zeros(2, 4)],
            "output, a Tensor that differs between microbatches, cannot be joined",
        ),
        ([1.0, "none"], "output, a float that differs"),
        ([(1.5, 2), (1.5, 2, 3)], "output, a tuple that differs"),
        ([object(), object()], "output, a object that differs"),
    ],
)
def test_nothing_that_cannot_be_merged_is_lost(outputs, said, caplog):
    with caplog.at_level(logging.WARNING):
        assert merge_outputs(outputs, (2, 2)) == outputs
    assert said in caplog.text


def test_lists_that_may_be_mistaken_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        merged = merge_outputs([[torch.zeros(2), torch.ones(2)]] * 2, (2, 2))
    assert [layer.tolist() for layer in merged] == [[0] * 4, [1] * 4]
    assert "output has as many tensors as a microbatch has samples" in caplog.text


def test_places_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        merged = merge_outputs([{"a": ("x", 1.0)}, {"a": ("y", 3.0)}], (1, 1))
    assert merged == {"a": (["x", "y"], 2.0)}
    assert "output['a'][0], a str" in caplog.text


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.data())
def test_weighted_means_of_means_are_the_mean_of_all(sizes, data):
    parts = [data.draw(st.lists(st.floats(-100, 100), min_size=size, max_size=size)) for size in sizes]
    merged = merge_outputs([float(np.mean(part)) for part in parts], sizes)
    assert merged == pytest.approx(float(np.mean([value for part in parts for value in part])), abs=1e-9)
