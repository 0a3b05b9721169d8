"""Running means and variances of samples, put together from those of microbatches as of all samples at once."""

import numpy as np
import pytest
import torch

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
    }


def put_together(as_kind, *, names, counts=True):
    """The numbers by these names, after 5 samples and a batch in microbatches."""
    before = {name: as_kind(value) for name, value in of_samples(DATA[:5]).items()}
    changes, start = [], 5
    for size in SIZES:
        seen = of_samples(np.concatenate([DATA[:5], DATA[start : start + size]]))
        changes.append({("rms", name): ("set", as_kind(seen[name])) for name in (*names, "count")})
        start += size
    of_batch = changes[-1] | {("rms", "count"): ("set", as_kind(float(len(DATA) if counts else 6)))}
    rules = Rules()
    rules.set({f"self.rms.{name}": f"running {name}" for name in names}, 1)
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
    expected = of_samples(DATA)
    assert set(found) == {("rms", "mean"), ("rms", name)}
    for (_, of), (how, value) in found.items():
        assert how == "set"
        assert type(value) is type(as_kind(expected[of]))
        np.testing.assert_allclose(np.asarray(value), expected[of], rtol=1e-9)


def test_without_a_count_of_samples_or_a_mean_nothing_is_said():
    assert not put_together(as_array, names=("mean", "variance"), counts=False)
    assert not put_together(as_array, names=("variance",))
