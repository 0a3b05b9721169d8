"""What a loss may be a mean over: with the right one, losses of microbatches add up to that of the batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_pfo.strategy.step.batches.splitting import split_batch
from lightning_pfo.strategy.step.batches.weights import IGNORED_LABEL, Labels, counts_of, shares_of
from lightning_pfo.strategy.step.first_batch.candidates import labels_with_gaps, labels_without_gaps, take_labels_away

BY_CLASS = torch.tensor([1.0, 0.0, 2.0, 5.0, 0.5], dtype=torch.float64)


def batch_of(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (size, 6), generator=generator)
    ignored = torch.rand(size, 6, generator=generator) < 0.4
    ignored[0, 2] = False  # not all of them
    return {"labels": labels.masked_fill(ignored, -100)}


@given(
    gaps=st.lists(st.integers(0, 5), min_size=4, max_size=9),
    number=st.integers(2, 4),
    form=st.sampled_from(["dict", "numpy", "flat"]),
)
def test_microbatches_have_other_numbers_of_labels(gaps, number, form):
    labels = torch.arange(len(gaps) * 5).reshape(len(gaps), 5)
    for row, ignored in enumerate(gaps):
        labels[row, :ignored] = -100
    labels = labels[:, 1].clone() if form == "flat" else labels
    before = labels.clone()
    batch = {"labels": labels.numpy() if form == "numpy" else labels, "x": torch.zeros(len(gaps), 2)}
    parts = split_batch(batch, number)
    are_other = take_labels_away(batch, parts.parts, labels_with_gaps(parts.parts, {IGNORED_LABEL}, are_shifted=False))
    now = torch.as_tensor(batch["labels"])
    assert are_other == bool((now == -100).sum() != (before == -100).sum())
    assert set(now.flatten().tolist()) <= set(before.flatten().tolist())
    joined = torch.cat([torch.as_tensor(part["labels"]) for part in parts])
    assert torch.equal(joined, now)
    if form != "flat":
        assert torch.equal((now != -100).any(1), (before != -100).any(1))  # no row is without any


def test_microbatches_that_are_copies_do_not_count():
    labels = torch.tensor([[1, -100], [2, 3], [4, 5], [6, 7]])
    parts = [{"labels": labels[:2].clone()}, {"labels": labels[2:].clone()}]
    assert not take_labels_away({"labels": labels}, parts, [Labels("batch['labels']", False)])


@given(size=st.integers(2, 12), number=st.integers(1, 5), seed=st.integers(0, 99), shifted=st.booleans())
def test_labels_with_gaps_are_found_and_counted_as_by_name(size, number, seed, shifted):
    parts = split_batch(batch_of(size, seed), min(number, size))
    found = labels_with_gaps(parts.parts, {IGNORED_LABEL}, are_shifted=shifted)
    assert found == [Labels("batch['labels']", shifted), Labels("batch['labels']", not shifted)]
    for labels in found:
        assert labels.counts(parts.parts) == counts_of(
            parts.parts, parts.sizes, "tokens", shifted_labels=labels.are_shifted
        )


def test_named_labels_are_likelier_and_others_are_none():
    gaps = torch.tensor([[1, -100], [2, 3]])
    batch = {"floats": gaps.float(), "full": gaps.abs(), "before": gaps, "labels": gaps.numpy()}
    found = labels_with_gaps([batch], {IGNORED_LABEL}, are_shifted=False)
    assert [labels.path for labels in found] == ["batch['labels']", "batch['before']"] * 2
    assert found[0].counts([batch, batch]) == (3.0, 3.0)
    assert found[2].counts([batch]) == (1.0,)  # without the first of each
    assert found[0].counts([batch, {"labels": None}]) is None


class Weighing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)  # has buffers that are no weights
        self.criterion = nn.CrossEntropyLoss(BY_CLASS)


def padded(part):
    return cross_entropy(part["logits"][:, :-1].mT, part["labels"][:, 1:], ignore_index=4)


def masked(part):
    each = cross_entropy(part["logits"].mT, part["labels"], reduction="none")
    return (each * part["mask"]).sum() / part["mask"].sum()


def weighted(part):
    return (part["logits"].mean((1, 2)) * part["weights"]).sum() / part["weights"].sum()


def by_class(part):
    return cross_entropy(part["logits"].mT, part["labels"], BY_CLASS, ignore_index=4)


def by_length(part):
    return part["logits"].sum() / part["lengths"].sum()


def test_of_a_mask_that_is_half_full_other_numbers_are_left():
    batch = {"mask": torch.tensor([True, True, False, False] * 4)}
    parts = split_batch(batch, 4)
    assert take_labels_away(batch, parts.parts, labels_without_gaps(batch, nn.Identity()))
    assert len({int(part["mask"].sum()) for part in parts.parts}) > 1


def test_what_is_not_finite_is_no_target():
    batch = {"y": torch.tensor([1.0, math.nan, 2.0, math.inf]), "image": torch.full((4, 1, 2, 2), math.nan)}
    (labels,) = (each for each in labels_without_gaps(batch, nn.Identity()) if not each.are_weights)
    assert str(labels) == "labels that are finite (batch['y'])"
    assert labels.counts(split_batch(batch, 2).parts) == (1.0, 1.0)


@pytest.mark.parametrize("loss", [padded, masked, weighted, by_class, by_length])
@given(size=st.integers(4, 9), number=st.integers(2, 4), seed=st.integers(0, 99))
def test_a_mean_over_something_else_is_that_of_microbatches_by_one_of_few_candidates(loss, size, number, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, 6, 5, generator=generator, dtype=torch.float64)
    lengths = torch.randint(2, 7, (size,), generator=generator)
    mask = torch.arange(6) < lengths[:, None]
    labels = torch.where(mask, torch.randint(2, 4, (size, 6), generator=generator), 4)
    labels[0, -1], labels[:, :2] = 4, torch.tensor([0, 2])
    weights = 0.1 + torch.rand(size, generator=generator)
    batch = {"logits": logits, "labels": labels, "mask": mask, "weights": weights, "lengths": lengths}
    batch["texts"] = ["a"] * size
    parts = split_batch(batch, number)
    losses = [float(loss(part)) for part in parts.parts]

    def explains(labels):
        shares = shares_of(labels.counts(parts.parts), parts.sizes)
        mean = sum(share * each for share, each in zip(shares, losses, strict=True) if share)
        return mean == pytest.approx(float(loss(batch)), rel=1e-6)

    found = labels_without_gaps(batch, Weighing())
    assert any(map(explains, found))
    assert len(found) < 60


def test_weights_and_lengths_are_halved_in_every_second_microbatch():
    weights = torch.tensor([1.0, 2.0, 4.0, 8.0])
    batch = {"weights": weights, "lengths": torch.tensor([1, 2, 5, 4])}
    parts = split_batch(batch, 2)
    labels = [Labels(f"batch['{name}']", False, are_weights=True) for name in batch]
    assert take_labels_away(batch, parts.parts, labels)
    assert weights.tolist() == [0.5, 1.0, 4.0, 8.0]
    assert batch["lengths"].tolist() == [1, 2, 3, 2]
    assert take_labels_away(batch, parts.parts, labels[1:])
    assert batch["lengths"].tolist() == [1, 1, 3, 2]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_masks_without_gaps_get_some(dtype):
    batch = {"mask": torch.ones(4, 3, dtype=dtype)}
    found = labels_without_gaps(batch, nn.Identity())
    assert found[0] == Labels("batch['mask']", False, 0.0)
    assert take_labels_away(batch, split_batch(batch, 2).parts, found)
    assert batch["mask"].tolist() == [[1, 0, 1]] * 2 + [[1, 1, 1]] * 2


def test_targets_of_several_classes_get_fewer():
    batch = {"targets": torch.tensor([[0.0, 1.0, 1.0]]).repeat(4, 1)}
    found = labels_without_gaps(batch, nn.Identity())
    assert take_labels_away(batch, split_batch(batch, 2).parts, found)
    assert batch["targets"].tolist() == [[0, 0, 1], [0, 0, 0], [0, 1, 1], [0, 1, 1]]


def test_weights_that_were_alike_are_told_apart():
    batch = {"ones": torch.ones(4), "others": torch.ones(4), "third": torch.ones(4)}
    parts = split_batch(batch, 2)
    found = labels_without_gaps(batch, nn.Identity())
    assert take_labels_away(batch, parts.parts, found)
    assert len({shares_of(labels.counts(parts.parts), parts.sizes) for labels in found}) == len(found)


def test_tokens_and_images_are_no_weights():
    images = torch.rand(4, 3, 2, 2)
    batch = {"tokens": torch.randint(0, 9, (4, 6)), "images": images, "masks": (images > 0.5).float()}
    found = labels_without_gaps(batch, nn.Identity())
    assert {labels.path for labels in found if labels.are_weights} == {"batch['masks']"}


def test_labels_that_are_nowhere_in_a_batch_count_nothing():
    assert labels_without_gaps({"x": torch.zeros(0), "names": ["a"]}, nn.Identity()) == []
    weighed = Labels("batch['x']", False, class_weights=(1.0, 2.0))
    assert weighed.counts([{"x": torch.tensor([0, 1, 1, 7])}]) == (5.0,)  # no class has this number
    assert weighed.counts([{"x": torch.tensor([0.0])}]) is None


def test_a_loss_beside_the_model_may_have_weights_of_classes():
    """As that of a loop of the user's own; 255 is no class."""

    class Loop(nn.Module):
        @property
        def loss_fn(self):
            return nn.CrossEntropyLoss(weight=BY_CLASS, ignore_index=255)

    found = labels_without_gaps({"y": torch.tensor([0, 255, 4, 255])}, Loop())
    assert Labels("batch['y']", False, 255, tuple(BY_CLASS.tolist())) in found
    assert not any(labels.class_weights for labels in labels_without_gaps({"y": torch.tensor([0, 255, 7])}, Loop()))


@pytest.mark.parametrize("form", ["tensors", "dicts", "arrays"])
def test_rows_of_what_each_sample_has_are_counted(form):
    found = [torch.zeros(number, 4) for number in (3, 0, 2, 5)]
    items = {
        "tensors": found,
        "arrays": [each.numpy() for each in found],
        "dicts": [{"image": f"{len(each)}.png", "boxes": each, "area": torch.tensor(1.0)} for each in found],
    }[form]
    path = "batch[1][*]" + "['boxes']" * (form == "dicts")
    batch = torch.zeros(4, 3), items
    rows = Labels(path, False, are_rows=True)
    assert rows in labels_without_gaps(batch, nn.Linear(1, 1))
    parts = split_batch(batch, 2).parts
    assert rows.counts(parts) == (3, 7)
    assert rows.counts([*parts, (torch.zeros(1, 3), [])]) is None
    assert rows.at_least_one().shares((0.0, 7.0), (2, 2)) == (1 / 7, 1)
