"""Weights of microbatches: with them, losses of microbatches add up to the loss of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_pfo.core.errors import BatchError, ConfigurationError
from lightning_pfo.strategy.step.batches.splitting import split_batch
from lightning_pfo.strategy.step.batches.weights import (
    check_microbatch_weight,
    counts_of,
    shares_of,
    shifts_labels,
    weights_of,
)


def batch_of(size, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (size, 6), generator=generator)
    ignored = torch.rand(size, 6, generator=generator) < 0.4
    ignored[0, 2] = False  # not all of them
    logits = torch.randn(size, 6, 5, generator=generator, dtype=torch.float64)
    return {"logits": logits, "labels": labels.masked_fill(ignored, -100)}


def mean_over_samples(part):
    return part["logits"].square().mean()


def mean_over_tokens(part):
    return cross_entropy(part["logits"].flatten(0, 1), part["labels"].flatten())


def mean_over_shifted_tokens(part):
    return cross_entropy(part["logits"][:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten())


def sum_over_tokens(part):
    return cross_entropy(part["logits"].flatten(0, 1), part["labels"].flatten(), reduction="sum")


def class_weighted(part):
    return cross_entropy(part["logits"][:, 0], part["labels"][:, 0].clamp(min=0), weight=CLASSES)


CLASSES = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.1], dtype=torch.float64)


def class_weight(part):
    return CLASSES[part["labels"][:, 0].clamp(min=0)].sum()


@pytest.mark.parametrize(
    ("loss_of", "how", "options"),
    [
        (mean_over_samples, "samples", {}),
        (mean_over_tokens, "tokens", {}),
        (mean_over_shifted_tokens, "tokens", {"shifted_labels": True}),
        (sum_over_tokens, "sum", {}),
        (class_weighted, class_weight, {}),
        (mean_over_tokens, lambda part: int((part["labels"] != -100).sum()), {}),
    ],
)
@given(size=st.integers(1, 9), number=st.integers(1, 5), seed=st.integers(0, 1000))
def test_weighted_losses_add_up_to_the_loss_of_the_batch(loss_of, how, options, size, number, seed):
    batch = batch_of(size, seed)
    parts = split_batch(batch, number)
    weights = weights_of(parts, parts.sizes, how, **options)
    total = sum(weight * float(loss_of(part)) for weight, part in zip(weights, parts, strict=True) if weight)
    assert total == pytest.approx(float(loss_of(batch)), rel=1e-6)
    assert sum(weights) == pytest.approx(len(parts) if how == "sum" else 1)


def test_labels_are_found_by_name_wherever_they_are():
    labels = torch.tensor([[1, -100], [-100, -100]])
    assert counts_of([labels_in(labels)], (2,), "tokens") == (1,)
    assert counts_of([{"labels": labels.numpy()}], (2,), "tokens") == (1,)
    assert counts_of([(({"labels": labels},), {})], (2,), "tokens") == (1,)
    assert counts_of([{"labels": np.array([3, -100])}], (2,), "tokens", shifted_labels=True) == (1,)  # no sequences


def labels_in(labels):
    class Batch:
        def __init__(self):
            self.labels = labels

    return Batch()


def test_batches_without_labels_are_told_what_there_is():
    with pytest.raises(
        BatchError, match=r"called 'labels'; the batch has batch\[0\], batch\[1\]\['y'\]\. Use a function"
    ):
        weights_of([(torch.zeros(2), {"y": torch.zeros(2)})], (2,), "tokens")


def test_where_nothing_is_counted_samples_are():
    parts = [{"labels": torch.full((size, 3), -100)} for size in (2, 1)]
    assert weights_of(parts, (2, 1), "tokens") == (2 / 3, 1 / 3)
    assert weights_of(parts, (2, 1), lambda part: 0) == (2 / 3, 1 / 3)
    parts[0]["labels"][0, 0] = 1
    assert weights_of(parts, (2, 1), "tokens") == (1, 0)


def test_shares_add_up_to_one_for_any_counts():
    assert math.fsum(shares_of([0.1] * 10, [1] * 10)) == 1


@pytest.mark.parametrize("how", ["token", None, 3])
def test_other_settings_are_refused(how):
    with pytest.raises(ConfigurationError, match=r"one of 'auto', 'samples', 'tokens', 'sum', or a function .*got"):
        check_microbatch_weight(how)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (-1, "0 or more; got -1.0 for microbatch 0"),
        (float("nan"), "got nan"),
        (float("inf"), "got inf"),
        ("many", "raised ValueError"),
        (torch.ones(2), "for microbatch 0, a dict, it raised [RV]"),
    ],
)
def test_functions_that_count_nothing_are_named(result, said):
    def count_words(part):
        return result

    with pytest.raises(BatchError, match=f"count_words.*{said}"):
        weights_of([{}], (1,), count_words)


def test_causal_language_models_are_known():
    transformers = pytest.importorskip("transformers")
    tiny = {
        "vocab_size": 10,
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }

    def made(name, config, **options):
        return getattr(transformers, name)(getattr(transformers, config)(**options))

    with torch.device("meta"):
        causal = made("LlamaForCausalLM", "LlamaConfig", **tiny, num_key_value_heads=1)
        gpt = made("GPT2LMHeadModel", "GPT2Config", n_layer=1, n_embd=8, n_head=1, vocab_size=10)
        masked = made("BertForMaskedLM", "BertConfig", **tiny)
        translating = made("T5ForConditionalGeneration", "T5Config", d_model=8, num_layers=1, num_heads=1, d_ff=8)
    assert shifts_labels(nn.Sequential(causal))
    assert shifts_labels(gpt)
    assert not shifts_labels(masked)
    assert not shifts_labels(translating)
    assert not shifts_labels(nn.Linear(2, 2))
