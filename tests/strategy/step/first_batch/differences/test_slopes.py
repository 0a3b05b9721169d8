"""Losses whose value is that of one device, while their gradients are not."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.step.first_batch.differences.slopes import Compared, Slopes, gap
from tests.quiet import QUIET

SAID = "its gradients are not the mean of theirs"


class TwoLosses(L.LightningModule):
    def __init__(self, of):
        super().__init__()
        self.of, self.at_first = of, None
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.classes, self.values = nn.Linear(16, 3), nn.Linear(16, 8)
        self.weights = nn.Parameter(torch.zeros(2))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        scores, values = self.classes(z), self.values(z)
        return self.of(self, F.cross_entropy(scores, y), F.mse_loss(values, x), scores, values, batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def by_that_of_the_first_batch(module, a, b, *_):
    if module.at_first is None:
        module.at_first = (a + b).detach()
    return (a + b) / module.at_first


def _views(module, batch):
    return module.values(module.net(torch.cat([batch[0], batch[0].flip(1)])))


def changed_in_place(module, a, b, scores, *_):
    scores -= 1
    return a + scores.square().mean()


HIDING = {
    "divided by themselves": lambda module, a, b, *_: a / a.detach() + b / b.detach(),
    "as large as the other": lambda module, a, b, *_: a + b * (a / b).detach(),
    "by that of the first batch": by_that_of_the_first_batch,
}
EQUAL = {
    "added": lambda module, a, b, *_: a + b,
    "learnt weights": lambda module, a, b, *_: (
        torch.exp(-module.weights) * torch.stack([a, b]) + module.weights
    ).sum(),
    "weights of samples": lambda module, a, b, scores, values, batch: (
        F.cross_entropy(scores, batch[1], reduction="none") * scores.softmax(-1).amax(-1).detach()
    ).mean(),
    "changed in place": changed_in_place,
    "dropout": lambda module, a, b, scores, values, batch: F.cross_entropy(F.dropout(scores, 0.3), batch[1]),
    "noise": lambda module, a, b, scores, values, batch: F.mse_loss(values + torch.randn_like(values), batch[0]),
    "by weights": lambda module, a, b, *_: a + 0.1 * module.values.weight.square().sum(),
    "two views": lambda module, a, b, scores, values, batch: F.mse_loss(*_views(module, batch).chunk(2)),
    "other order of rows": lambda module, a, b, scores, values, batch: (
        module.values(module.net(torch.cat([batch[0], batch[0].flip(0) * 0.5]))).square().mean()
    ),
    "time by time": lambda module, a, b, scores, values, batch: F.mse_loss(
        module.values(module.net(batch[0].repeat_interleave(3, 0))), batch[0].repeat_interleave(3, 0)
    ),
    "of no layer": lambda module, a, b, *_: module.weights.square().sum(),
}


def train(of, **options):
    torch.manual_seed(0)
    module = TwoLosses(of)
    data = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
    strategy = PfoPipelineStrategy(num_microbatches=4, **options) if options else "auto"
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(module, DataLoader(data, batch_size=16))
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


@pytest.mark.parametrize("name", HIDING)
def test_gradients_that_no_mean_explains_are_told_of_and_the_way_out_is_true(name, caplog):
    alone = train(HIDING[name])
    assert not torch.allclose(train(HIDING[name], schedule="1f1b"), alone, atol=1e-4)
    assert caplog.text.count(SAID) == 1
    assert "loss_over='batch'" in caplog.text
    caplog.clear()
    torch.testing.assert_close(train(HIDING[name], schedule="gpipe", loss_over="batch"), alone)
    assert SAID not in caplog.text


@pytest.mark.parametrize("name", EQUAL)
def test_of_others_nothing_is_said(name, caplog):
    train(EQUAL[name], schedule="1f1b")
    assert SAID not in caplog.text


def test_without_the_comparison_nothing_is_looked_at(caplog):
    train(HIDING["divided by themselves"], schedule="1f1b", check_loss=False)
    assert SAID not in caplog.text


def slopes_of(layer, batches, loss_of):
    slopes = Slopes()
    for batch in batches:
        with torch.no_grad(), slopes.of_step():
            loss = loss_of(layer(batch))
        slopes.take(loss)
    return slopes


def test_only_the_end_of_a_step_has_gradients():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), torch.randn(6, 4)
    (found,) = slopes_of(layer, [x], lambda y: y.square().mean()).found
    (slope,) = found
    torch.testing.assert_close(slope, 2 * layer(x).detach() / 12)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_microbatches_are_weighed_and_joined_along_their_samples():
    layer, x = nn.Linear(4, 2), torch.randn(6, 4)
    whole = slopes_of(layer, [x], lambda y: y.square().mean())
    parts = slopes_of(layer, x.split([4, 2]), lambda y: y.square().mean())
    assert gap([Compared(parts, whole, (4 / 6, 2 / 6), (4, 2))], 1e-5) == 0
    assert gap([Compared(parts, whole, (0.5, 0.5), (4, 2))], 1e-5) > 0.2
    in_time = slopes_of(layer, [x.T.reshape(4, 6).T[None]], lambda y: y.square().mean())
    assert Compared(parts, in_time, (0.5, 0.5), (4, 2)).flat() is None  # of another form


def test_rows_of_packed_sequences_are_compared_in_the_order_of_the_batch():
    layer, sequences = nn.Linear(4, 2), [torch.randn(length, 4) for length in (5, 2, 7, 3, 4, 1)]

    def packed(some):
        return nn.utils.rnn.pack_sequence(some, enforce_sorted=False).data

    def slopes(*batches):
        return slopes_of(layer, map(packed, batches), lambda y: y.square().mean())

    parts, whole = slopes(sequences[:4], sequences[4:]), slopes(sequences)
    assert gap([Compared(parts, whole, (17 / 22, 5 / 22), (4, 2))], 1e-5) == 0
    assert gap([Compared(parts, whole, (4 / 6, 2 / 6), (4, 2))], 1e-5) > 0.05


def test_a_loss_without_gradients_is_not_compared():
    nothing = slopes_of(nn.Linear(4, 2), [torch.randn(2, 4)], lambda y: y.detach().sum())
    assert Compared(nothing, nothing, (1.0,), (2,)).flat() is None
    assert gap([None], 1e-5) == gap([Compared(nothing, nothing, (1.0,), (2,))], 1e-5) == 0


def test_random_gradients_differ_where_chance_does_not_explain_it():
    generator = torch.Generator().manual_seed(0)

    def given(gradient):
        slopes = Slopes()
        slopes.found.append([gradient])
        return slopes

    def draws(size, shift):
        pairs = torch.randn(4, 2, size, generator=generator)
        return [Compared(given(one + shift), given(other), (1.0,), (1,)) for one, other in pairs]

    for size in (1, 3, 100, 10_000):
        assert sum(gap(draws(size, 0.0), 1e-5) > 0 for _ in range(500)) <= 5
    assert gap(draws(10_000, 30.0), 1e-5) > 0.5
