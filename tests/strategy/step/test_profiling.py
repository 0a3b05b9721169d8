"""Actions that a step times itself, in a training on one stage and by hand."""

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.patches import Patches
from lightning_pfo.strategy.step.effects.outward.profiling import StepActions
from tests.quiet import QUIET


class Timed(L.LightningModule):
    """Times its layers, in both ways."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        self.trainer.profiler.start("layers")
        output = self.layers(batch)
        self.trainer.profiler.stop("layers")
        with self.trainer.profiler.profile("loss"):
            return output.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_step_times_each_microbatch_and_no_comparison():
    profiler = SimpleProfiler()
    strategy = PfoPipelineStrategy(num_microbatches=3)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, profiler=profiler, **QUIET)
    trainer.fit(Timed(), DataLoader(torch.randn(12, 4), batch_size=6))
    assert {name: len(profiler.recorded_durations[name]) for name in ("layers", "loss", "run_training_batch")} == {
        "layers": 6,
        "loss": 6,
        "run_training_batch": 2,
    }
    assert vars(profiler).keys().isdisjoint({"start", "stop"})


def test_a_run_that_ends_early_stops_what_it_has_started():
    profiler, is_within = SimpleProfiler(), [True]
    with Patches() as patches:
        actions = StepActions(profiler, lambda: is_within[0], patches)

        def ends_early():
            with actions.of_run():
                profiler.start("outer")
                profiler.start("inner")
                raise KeyError

        for _ in range(2):
            with pytest.raises(KeyError):
                ends_early()
        assert {name: len(durations) for name, durations in profiler.recorded_durations.items()} == {
            "outer": 2,
            "inner": 2,
        }
        profiler.start("traced")  # in a step, but in no run that counts
        profiler.stop("traced")
        is_within[0] = False
        profiler.start("hook")
        with pytest.raises(ValueError, match="already started"):
            profiler.start("hook")
        profiler.stop("hook")
    assert sorted(profiler.recorded_durations) == ["hook", "inner", "outer"]
