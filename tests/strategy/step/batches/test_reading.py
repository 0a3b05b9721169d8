"""How many samples a batch has, and which lists are lists of samples."""

import logging
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lightning_pfo.core.errors import BatchError
from lightning_pfo.loops.call import ARGUMENTS
from lightning_pfo.strategy.step.batches.reading import Known, read
from lightning_pfo.strategy.step.batches.splitting import split_batch


def zeros(*shape):
    return torch.zeros(shape)


IMAGES = tuple(zeros(3, 4 + i, 4) for i in range(4))
TARGETS = tuple({"boxes": zeros(i, 4), "labels": zeros(i)} for i in range(4))


@pytest.mark.parametrize(
    ("batch", "size", "lists"),
    [
        ([zeros(4, 2), zeros(4)], 4, []),
        ([zeros(2, 2), zeros(2)], 2, []),  # as many tensors as samples: structure
        ([zeros(2, 2), zeros(2, 1)], 2, []),
        ((zeros(2), zeros(2)), 2, []),
        ([[zeros(5, 2), zeros(5)], [zeros(5, 2), zeros(5)]], 5, []),  # of two loaders
        ([zeros(16, 3, 4, 4)] * 2, 16, []),  # two views
        ((IMAGES, TARGETS), 4, ["batch[0]", "batch[1]"]),  # torchvision's detection: tuple(zip(*samples))
        ((IMAGES[:2], TARGETS[2:]), 2, ["batch[0]", "batch[1]"]),
        # as many boxes as samples, but beside a list of images
        ((IMAGES[:2], ({"boxes": zeros(2, 4)},) * 2), 2, ["batch[0]", "batch[1]"]),
        ([{"image": zeros(3, 4, 4), "height": 4, "boxes": zeros(5, 4)}] * 4, 4, ["batch"]),
        ([{"image": zeros(3, 4, 4), "height": 4}] * 4, 4, ["batch"]),  # all sizes are 3, but a number is beside them
        ([(zeros(3, 4, 4), 1), (zeros(3, 4, 4), 0)], 2, ["batch"]),
        ([(zeros(7), zeros(5, 2)), (zeros(6), zeros(5, 2))], 2, ["batch"]),
        ({"points": [zeros(5, 2), zeros(6, 2)], "y": zeros(2)}, 2, ["batch['points']"]),
        ({"points": [zeros(5, 2), None], "y": zeros(2)}, 2, ["batch['points']"]),
        (
            {"points": [np.zeros((5, 2)), np.zeros((6, 2))], "names": ["a", "b"]},
            2,
            ["batch['names']", "batch['points']"],
        ),
        ({"x": zeros(2), "meta": ["a", "b"]}, 2, ["batch['meta']"]),
        ([("a", "b"), ("c", "d"), zeros(2)], 2, ["batch[0]", "batch[1]"]),  # default_collate of texts
        ({"x": zeros(2), "meta": [("a", "b"), ("c", "d")]}, 2, ["batch['meta'][0]", "batch['meta'][1]"]),
        ({"x": zeros(2), "meta": [["a", "b"], ["c", "d"]]}, 2, ["batch['meta']"]),
        # all of one size, but default_collate leaves no number or tensor without dimensions beside tensors
        ([(zeros(4), 1)] * 4, 4, ["batch"]),
        ([(zeros(4), zeros())] * 4, 4, ["batch"]),
        ([{"x": zeros(4), "name": "a"}] * 4, 4, ["batch"]),
        ({"x": zeros(2), "of_each": [(zeros(2), 1)] * 2}, 2, ["batch['of_each']"]),
        ([("a", 1), ("b", 0)], 2, ["batch"]),  # fields have values of one class
        ([([1, 2, 3], 1, "a"), ([3], 0, "b"), ([], 1, "c")], 3, ["batch"]),
        (["a", "b", "c"], 3, ["batch"]),
        ((["a", "b", "c"], [1, 2, 3]), 3, ["batch[0]", "batch[1]"]),
        ([("a", 1), ("b", 2), ("c", 3)], 3, ["batch"]),
        ({"text": ["a", "b", "c"], "label": [0, 1, 0], "task": "sst2"}, 3, ["batch['label']", "batch['text']"]),
    ],
)
def test_batches_are_understood(batch, size, lists):
    reading = read(batch)
    assert reading.size == size
    assert sorted(reading.lists) == lists


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"input_ids": zeros(8, 3), "labels": zeros(7)}, r"batch\['input_ids'\] has 8, batch\['labels'\] has 7\. What"),
        ({"input_ids": zeros(8, 3), "x": {"mask": np.zeros(7)}}, r"batch\['x'\]\['mask'\] has 7"),
        ([zeros(8, 3), zeros(7, 3)], r"batch\[0\] has 8, batch\[1\] has 7\. With batch_dim=1, all have 3: use it if"),
        ([zeros(2), zeros(3, 1)], "must be the same for all, got"),
        ({"x": zeros(8), "data": (zeros(8), {"y": zeros(9)})}, r"batch\['data'\]\[1\]\['y'\] has 9"),
        ({"text": ["a", "b"], "labels": [0, 1, 2]}, r"batch\['text'\] has 2, batch\['labels'\] has 3"),
        ({"x": torch.tensor(1), "y": "text"}, "got no tensor, array or list in a dict"),
        (None, "got no tensor, array or list in a NoneType"),
        (zeros(0, 2), "one sample at least; batch has none"),
        ([zeros(5), zeros(6), zeros(7)], r"batch\[2\] has 7.*split_batch="),
        ([("a", "b"), ("c", "d"), ("e", "f")], "either may be the number of samples"),
    ],
)
def test_batches_without_one_size_are_refused(batch, said):
    with pytest.raises(BatchError, match=said):
        read(batch)


def test_dimensions_are_named():
    with pytest.raises(BatchError, match=r"along dimension 1 .*batch\[0\] has 8, batch\[1\] has 7"):
        read((zeros(3, 8), zeros(3, 7)), batch_dim=1)
    with pytest.raises(BatchError, match="With batch_dim=0, all have 3"):
        read((zeros(3, 8), zeros(3, 7)), batch_dim=1)


@pytest.mark.parametrize(
    ("batch", "expected", "size"),
    [
        (list(IMAGES), [4, 1], 4),
        (list(IMAGES), [3], 3),
        ([zeros(3, 5, 5)] * 2, [3], 3),
        ([{"x": zeros(5), "y": zeros(5)}] * 4, [4], 4),
        ([{"x": zeros(5), "y": zeros(5)}] * 4, [5, 5], 5),
        ([zeros(5), zeros(6)], [2], 2),
        ([("a", "b"), ("c", "d"), ("e", "f")], [3], 3),
        ([zeros(64, 2), zeros(64)], [1], 64),  # DataLoader(batch_size=1, collate_fn=...) may yield more
        ([zeros(64, 2), zeros(64, 1)], [2], 64),
    ],
)
def test_the_size_of_the_loader_decides_where_both_readings_are_possible(batch, expected, size):
    assert read(batch, expected=expected).size == size


def test_lists_of_samples_are_such_in_a_last_batch_that_is_shorter():
    known = Known()
    sample = [1, 2, 3, 4], 0
    assert [read([sample] * size, expected=(4, 3), known=known).size for size in (4, 3)] == [4, 3]
    with pytest.raises(BatchError, match="either may be the number of samples"):
        read([sample] * 3, expected=(4, 3))


def test_numbers_beside_a_list_of_tensors_say_that_it_has_one_for_each_sample(caplog):
    pairs = tuple((zeros(3, 8, 8), zeros(3, 8, 8)) for _ in range(5))
    with caplog.at_level(logging.WARNING):
        assert read((pairs, (0, 1, 2, 0, 1))).size == 5
        assert read(([zeros(3, 5), zeros(3, 5)], zeros(3))).size == 3
    assert not caplog.records


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (list(IMAGES), "batch is taken for 4 parts of a batch of 3 samples"),
        ([{"x": zeros(5), "y": zeros(5)}] * 4, "batch is taken for 4 parts of a batch of 5 samples"),
        ({"points": [zeros(2, 3), zeros(2, 3)], "y": zeros(2)}, r"batch\['points'\] has as many items as the batch"),
        ((zeros(2, 5), [{"boxes": zeros(2, 4)}] * 2), r"batch\[1\] has as many items as the batch.*split_batch="),
    ],
)
def test_what_may_be_mistaken_is_said_once(batch, said, caplog):
    with caplog.at_level(logging.WARNING):
        read(batch)
        read(batch)
    assert len([record for record in caplog.records if re.search(said, record.getMessage())]) <= 1
    assert re.search(said, caplog.text)


@pytest.mark.parametrize(
    "batch",
    [[zeros(64, 10), zeros(64, 1)], [zeros(2, 10), zeros(2, 1)], [zeros(16, 3, 4, 4)] * 2, (IMAGES, TARGETS)],
    ids=["regression", "two samples", "two views", "detection"],
)
def test_ordinary_batches_are_understood_without_a_word(batch, caplog):
    with caplog.at_level(logging.WARNING):
        read(batch)
    assert caplog.text == ""


@dataclass
class Sentences:
    ids: torch.Tensor
    labels: torch.Tensor


@pytest.mark.parametrize(
    ("arguments", "size", "lists"),
    [
        ((Sentences(zeros(8, 6), zeros(8)),), 8, []),
        (({"x": zeros(5), "y": zeros(5)},), 5, []),
        ((zeros(3, 5, 5), zeros(3, 5, 5)), 3, []),  # they look like two images
        ((["a", "b", "c"],), 3, ["batch[0][0]"]),
        (("mean", "max", zeros(3)), 3, []),
        ((IMAGES, TARGETS), 4, ["batch[0][0]", "batch[0][1]"]),
    ],
    ids=["dataclass", "dict", "two tensors", "texts", "options", "detection"],
)
def test_the_arguments_of_a_call_are_no_list_of_samples(arguments, size, lists, caplog):
    with caplog.at_level(logging.WARNING):
        for named in ({}, {"weights": zeros(size)}):
            reading = read((arguments, named), known=Known(ARGUMENTS))
            assert (reading.size, sorted(reading.lists)) == (size, lists)
    assert caplog.text == ""


def test_options_beside_as_many_samples_are_given_to_each_microbatch():
    batch = (("mean", "max"), {"x": zeros(2)})
    assert [args for args, _ in split_batch(batch, 2, known=Known(ARGUMENTS))] == [("mean", "max")] * 2


def test_many_samples_of_different_sizes_are_read_in_little_more_than_one_pass():
    class Counting(list):
        looked_at = 0

        def __iter__(self):
            Counting.looked_at += 1
            return super().__iter__()

    points = Counting(zeros(i + 1, 2) for i in range(200))
    parts = split_batch({"y": zeros(200), "points": points}, 4)
    assert [len(part["points"]) for part in parts] == [50] * 4
    assert Counting.looked_at < 50


def test_tensors_of_all_samples_in_a_list_as_long_as_a_batch_are_so_in_a_shorter_last_one():
    known = Known()
    for size in (2, 2, 1):
        reading = read([torch.zeros(size, 8), torch.zeros(size, 4)], expected={2}, known=known)
        assert (reading.size, reading.lists) == (size, frozenset())
    known = Known()
    for numbers in ((3, 1), (2, 2), (1, 1)):  # boxes of each sample
        reading = read({"boxes": [torch.zeros(number, 4) for number in numbers]}, expected={2}, known=known)
        assert (reading.size, reading.lists) == (2, frozenset({"batch['boxes']"}))
