"""What is remembered of microbatches of many forms."""

import gc
from collections import Counter
from contextlib import suppress
from pathlib import Path

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.step import programs
from tests.launch import of_ranks, run_script
from tests.quiet import QUIET
from tests.saying import saying

KEPT = 4
LENGTHS = (*range(3, 15), 3, 14, 3)
"""Of batches; the last ones were seen before, the second of these of the forms that are remembered."""
WIDTH = 8


def bytes_of_tensors():
    """What all living tensors lie in."""
    gc.collect()
    of_each = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, nn.Parameter) and found.device.type == "cpu":  # others stand for these
            with suppress(RuntimeError):  # some have no storage, as sparse ones
                storage = found.untyped_storage()
                of_each[storage.data_ptr()] = storage.nbytes()
    return sum(of_each.values())


class OfAnyLength(L.LightningModule):
    def __init__(self, traced):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.traced, self.new, self.losses, self.known, self.bytes = traced, [], [], [], []

    def training_step(self, batch, batch_idx):
        return (self.net(batch) - 0.5).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        self.new.append(self.traced[batch.shape[1]])
        self.bytes.append(bytes_of_tensors())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy, traced):
    noise = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, length, WIDTH, generator=noise) for length in LENGTHS]
    module = OfAnyLength(traced)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module


@pytest.mark.slow
def test_the_forms_that_came_last_are_remembered_and_nothing_is_kept_of_others(monkeypatch):
    traced = Counter()
    ordinary = programs.Programs._trace

    def trace(self, step, *args):
        found = ordinary(self, step, *args)
        traced[found.values[0].form.shape[1]] += 1
        assert len(self._known) <= KEPT
        return found

    monkeypatch.setattr(programs, "_KEPT", KEPT)
    monkeypatch.setattr(programs.Programs, "_trace", trace)
    module = train(PfoPipelineStrategy(num_microbatches=2, check_loss=False), traced)
    assert module.losses == pytest.approx(train("auto", traced).losses, rel=1e-5)
    assert [module.traced[length] for length in (3, 4, 14)] == [2, 1, 1], "one was forgotten and came again"
    at_least = module.bytes[KEPT]
    assert max(module.bytes[KEPT:]) - at_least < 64, "bytes of forms that are gone"


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x)


class LogsCounts(L.LightningModule):
    """Reads in the step, or a hook, what layers count, and sets it back there."""

    def __init__(self, in_step):
        super().__init__()
        self.net, self.in_step, self.seen = nn.Sequential(Counts(), nn.Tanh(), Counts()), in_step, []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).square().mean()
        if self.in_step:
            self.log("calls", float(self.net[0].calls))
            self.net[0].calls = 0
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsCountsInAHook(LogsCounts):
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(self.net[0].calls)


@pytest.mark.parametrize(("case", "is_told"), [(LogsCounts(True), True), (LogsCountsInAHook(False), False)])
def test_a_step_that_reads_what_layers_count_is_told_of_it(case, is_told):
    strategy = PfoPipelineStrategy(num_microbatches=2)
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=1, **QUIET)
    with saying() as texts:
        trainer.fit(case, DataLoader(torch.randn(12, WIDTH), batch_size=4))
    assert ["A layer counts in self.net.0.calls" in text for text in texts].count(True) == is_told
    assert not any("did not run forward" in text for text in texts), "the comparison with one device has ended"
    assert case.seen in ([], [1, 2, 3])


@pytest.mark.slow
def test_a_step_that_draws_is_traced_until_that_is_seen_to_decide_nothing_and_again_once_it_does(tmp_path):
    run_script(Path(__file__).parents[1] / "scripts" / "drawing.py", tmp_path)
    for rank in of_ranks(tmp_path, 2):
        trusting, always = rank
        assert trusting["losses"] == always["losses"]
        assert always["traced"] == [2] * 12
        assert trusting["traced"][:8] == [2] * 4 + [0] * 4
        assert trusting["traced"][-1] == 2
