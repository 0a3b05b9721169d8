"""Running means and variances of samples, put together from those of microbatches as of all samples at once."""

import numpy as np
import pytest
import torch

from lightning_pfo.strategy.model.reach.places import named
from lightning_pfo.strategy.step.batches.rules import RUNNING, Rules
from lightning_pfo.strategy.step.metrics.running import running_in

SIZES = (3, 3, 1)
DATA = np.random.default_rng(0).normal(2.0, 3.0, (5 + sum(SIZES), 2))


def of_samples(samples):
    """What is kept of samples."""
    squares = ((samples - samples.mean(0)) ** 2).sum(0)
    return {
        "mean": samples.mean(0),
        "variance": squares / len(samples),
        "squares": squares,
        "deviation": np.sqrt(squares / len(samples)),
        "count": float(len(samples)),
        "variance of n - 1": squares / (len(samples) - 1),
    }


def with_variance_by_torch(seen, samples):
    """What is kept after a batch of samples of which the variance is torch's, which divides by one less."""
    (before, of_batch), total = (seen["count"], len(samples)), seen["count"] + len(samples)
    apart = samples.mean(0) - seen["mean"]
    with np.errstate(invalid="ignore"):  # of one sample
        variance = ((samples - samples.mean(0)) ** 2).sum(0) / np.float64(of_batch - 1)
    squares = seen["variance by torch.var"] * before + variance * of_batch
    return {
        "mean": seen["mean"] + apart * of_batch / total,
        "variance by torch.var": (squares + apart**2 * before * of_batch / total) / total,
        "count": total,
    }


def put_together(as_kind, *, names, counts=True):
    """The numbers by these names, after 5 samples and a batch in microbatches."""
    known = of_samples(DATA[:5])
    known["variance by torch.var"] = known["variance"]
    before = {name: as_kind(value) for name, value in known.items()}
    changes, start = [], 5
    for size in SIZES:
        new = DATA[start : start + size]
        seen = of_samples(np.concatenate([DATA[:5], new])) | with_variance_by_torch(known, new)
        changes.append({("rms", name): ("set", as_kind(seen[name])) for name in (*names, "count")})
        start += size
    of_batch = changes[-1] | {("rms", "count"): ("set", as_kind(float(len(DATA) if counts else 6)))}
    rules = Rules()
    rules.set({named(("rms", name)): f"running {name}" for name in names}, 1)
    return running_in(changes, of_batch, lambda path: before[path[-1]], SIZES, rules)


def as_array(value):
    return value


def as_tensor(value):
    return torch.as_tensor(value)


@pytest.mark.parametrize("as_kind", [as_array, as_tensor])
@pytest.mark.parametrize("kind", RUNNING[1:])
def test_they_are_those_of_all_samples(as_kind, kind):
    name = kind.removeprefix("running ")
    found = put_together(as_kind, names=("mean", name))
    known = of_samples(DATA[:5])
    known["variance by torch.var"] = known["variance"]
    expected = of_samples(DATA) | with_variance_by_torch(known, DATA[5:])
    assert set(found) == {("rms", "mean"), ("rms", name)}
    for (_, of), (how, value) in found.items():
        assert how == "set"
        assert type(value) is type(as_kind(expected[of]))
        np.testing.assert_allclose(np.asarray(value), expected[of], rtol=1e-9)


def test_without_a_count_of_samples_or_a_mean_nothing_is_said():
    assert not put_together(as_array, names=("mean", "variance"), counts=False)
    assert not put_together(as_array, names=("variance",))
