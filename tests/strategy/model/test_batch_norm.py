import copy

import pytest
import torch
from torch import nn

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.model.batch_norm import DeferredBatchNorms, defer_batch_norms, what_they_normalise
from tests.strategy.model.stages import Holder, Stages


class OfItsOwn(nn.BatchNorm1d):
    """With a `forward` of its own, as timm's."""

    def forward(self, input):
        self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, True, self.momentum, self.eps
        )


@pytest.mark.parametrize("make", [nn.BatchNorm1d, OfItsOwn, lambda size: nn.BatchNorm1d(size, momentum=None)])
def test_statistics_are_those_of_whole_batches_of_odd_microbatches(make):
    norm = make(3).double()
    expected = copy.deepcopy(norm)
    with Patches() as patches:
        deferred = DeferredBatchNorms(norm, patches)
        for _ in range(2):
            batch = torch.randn(9, 3, 4, dtype=torch.float64) * 5 + torch.arange(3)[:, None]
            with deferred.batch():
                for part in batch.split([4, 3, 2]):
                    with deferred.forward_of(stage=0):
                        assert torch.equal(norm(input=part), copy.deepcopy(expected).train()(part))
                    norm(part)  # again in backward: counts for nothing
            expected(batch)
            for name, value in expected.named_buffers():
                torch.testing.assert_close(norm.get_buffer(name), value, rtol=1e-12, atol=1e-12)
    norm(batch)
    expected(batch)
    torch.testing.assert_close(norm.running_var, expected.running_var, rtol=1e-12, atol=1e-12)


def test_nothing_is_noted_in_evaluation_or_of_a_batch_that_failed():
    norm = nn.BatchNorm1d(3)
    before = copy.deepcopy(norm.state_dict())
    with Patches() as patches:
        deferred = DeferredBatchNorms(norm, patches)
        with deferred.batch(), deferred.forward_of(stage=0):
            norm.eval()(torch.randn(4, 3))
        with pytest.raises(RuntimeError, match="shapes"), deferred.batch(), deferred.forward_of(stage=0):
            nn.Sequential(norm.train(), nn.Linear(5, 1))(torch.randn(4, 3))
        assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())


def test_what_cannot_be_deferred_is_refused():
    with Patches() as patches:
        assert defer_batch_norms(nn.BatchNorm1d(3), "microbatch", patches, compiles=True) is None
        assert defer_batch_norms(nn.LayerNorm(3), "deferred", patches, compiles=True) is not None
        with pytest.raises(ConfigurationError, match="Leave out compile=True, or batch_norm='deferred'"):
            defer_batch_norms(nn.BatchNorm1d(3), "deferred", patches, compiles=True)
        with pytest.raises(ConfigurationError, match="'microbatch' or 'deferred'; got 'batch'"):
            defer_batch_norms(nn.BatchNorm1d(3), "batch", patches, compiles=False)


def test_a_single_sample_is_refused_with_the_way_out():
    """Torch says only that there is no variance."""
    owner = Holder(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    stages = Stages(owner, lambda owner: owner.model(torch.ones(1, 2)).sum(), num_stages=2)
    try:
        with pytest.raises(
            ConfigurationError, match=r"two samples or more in each microbatch.*fewer microbatches"
        ) as said:
            stages.run()
    finally:
        stages.close()
    assert isinstance(said.value.__cause__, ValueError)


def test_what_is_said_of_them_knows_of_steps_that_end_on_the_whole_batch():
    said = what_they_normalise(nn.BatchNorm1d(3), (4, 4), are_deferred=False, is_end_whole=True)
    assert "normalises microbatches of 4 samples, not the batch of 8" in said
    assert "In the end of the step it is that (loss_over='batch')." in said
    assert "In the end" not in what_they_normalise(nn.BatchNorm1d(3), (4, 4), are_deferred=False)
