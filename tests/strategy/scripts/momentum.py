"""A teacher that follows its student, moved by the step itself or by a hook; usage: momentum.py FOLDER.

On one rank and on two; each writes losses and weights.
"""

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
DATA = torch.randn(58, 8, generator=torch.Generator().manual_seed(1))


class Assigns(L.LightningModule):
    """Moves the teacher first, by assigning data."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.student = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
        self.predictor = nn.Linear(8, 8)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.losses = []

    @torch.no_grad()
    def move(self):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.data = 0.9 * q.data + 0.1 * p.data

    def training_step(self, batch, batch_idx):
        self.move()
        return self.loss(batch)

    def loss(self, batch):
        with torch.no_grad():
            target = self.teacher(batch[0].roll(1, 1))
        return -functional.cosine_similarity(self.predictor(self.student(batch[0])), target, -1).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW([*self.student.parameters(), *self.predictor.parameters()], lr=1e-2)


class InPlace(Assigns):
    def move(self):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.data.mul_(0.9).add_(p.data, alpha=0.1)


class EverySecondBatch(InPlace):
    def training_step(self, batch, batch_idx):
        if batch_idx % 2 == 0:
            self.move()
        return self.loss(batch)


class Later(InPlace):
    """The first batch does not show it."""

    def training_step(self, batch, batch_idx):
        if batch_idx > 4:
            self.move()
        return self.loss(batch)


class LaterOnAnotherWay(Later):
    """The first stage does not find there what the trace has, so that the step is traced again, and would run again."""

    def training_step(self, batch, batch_idx):
        extra = 0
        if batch_idx > 4:
            with torch.no_grad():
                self.predictor.bias.data.mul_(0.5)
            extra = self.student[0](batch[0].roll(1, 1)).mean()
        return self.loss(batch) + extra


class AtTheEnd(Assigns):
    """Moves the teacher where only the last stage comes to."""

    @torch.no_grad()
    def training_step(self, batch, batch_idx):
        with torch.enable_grad():
            loss = self.loss(batch)
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), 0.2)
        return loss


class Beside(Assigns):
    """Student and teacher have layers of unlike kinds, an embedding and a head each, moved by one loop."""

    def __init__(self):
        super().__init__()
        parts = [nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU()]
        self.student, self.embed, self.head = nn.Sequential(*parts), nn.Linear(8, 8), nn.Linear(8, 4)
        copies = copy.deepcopy([self.student, self.embed, self.head])
        self.teacher, self.embed_too, self.head_too = (each.requires_grad_(False) for each in copies)

    @torch.no_grad()
    def move(self):
        ours = [p for each in (self.student, self.embed, self.head) for p in each.parameters()]
        theirs = [p for each in (self.teacher, self.embed_too, self.head_too) for p in each.parameters()]
        for p, q in zip(ours, theirs, strict=True):
            q.data = 0.9 * q.data + 0.1 * p.data

    def loss(self, batch):
        rows = self.head(self.student(self.embed(batch[0])))
        with torch.no_grad():
            target = self.head_too(self.teacher(self.embed_too(batch[0].roll(1, 1))))
        return (rows - target).square().mean() + self.predictor(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Constrains(Assigns):
    """Writes into a weight that is trained, with gradients noted, as a constraint of its norm."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            weight = self.student[1][0].weight
            weight.copy_(weight.renorm(2, 0, 0.5))
        return self.loss(batch)


class Quantises(Assigns):
    """Trains by rounded weights: remembers those of all layers, and gives each rank's own back after backward."""

    def training_step(self, batch, batch_idx):
        self.remembered = [p.detach().clone() for p in self.student.parameters()]
        before = [p.detach().clone() for p in self.predictor.parameters()]
        with torch.no_grad():
            for p in (*self.student.parameters(), *self.predictor.parameters()):
                p.copy_((p / 0.1).round() * 0.1)
        del before
        return self.loss(batch)

    def on_after_backward(self):
        for p, before in zip(self.student.parameters(), self.remembered, strict=True):
            if not p.is_meta:
                p.data.copy_(before)


class ConstrainsTied(Assigns):
    """Writes into a weight of two layers, which two stages may have."""

    def __init__(self):
        super().__init__()
        self.student[3][0].weight = self.student[0][0].weight

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.student[0][0].weight.clamp_(-0.1, 0.1)
        return self.loss(batch)


class OwnWeights(Assigns):
    """Writes into parameters of the module itself, before layers use one, and after the loss was made of another."""

    def __init__(self):
        super().__init__()
        self.scale, self.weight = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8, 8) / 3)

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.2)
        loss = self.loss([batch[0] * self.scale])
        loss = loss + (self.student(batch[0]) @ self.weight).square().mean()
        self.weight.data.clamp_(min=0.0)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class ConstrainsByBatch(Assigns):
    """Writes something else for each microbatch."""

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            self.student[1][0].weight.mul_(1 + 0.01 * batch[0].mean())
        return self.loss(batch)


class FollowsTheBatch(Assigns):
    """The same, into a weight that is not trained."""

    def move(self):
        with torch.no_grad():
            self.teacher[0][0].bias.copy_(self.offset)

    def training_step(self, batch, batch_idx):
        self.offset = batch[0].mean(0)
        return super().training_step(batch, batch_idx)


class InAHook(Assigns):
    """Moves the teacher after the optimizer's step, in place; layers have buffers of every kind."""

    def __init__(self):
        super().__init__()
        for layers in (self.student, self.teacher):
            for number, layer in enumerate(layers):
                layer.register_buffer("mask", torch.arange(4) < number)
                layer.register_buffer("turn", torch.full((3, 2), 1j * number).t())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    @torch.no_grad()
    def move(self):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        whole = getattr(self.trainer.strategy, "whole_parameters", lambda *_: nullcontext())
        with whole(self.student, self.teacher):
            self.move()
            self.losses.append(sum(float(layer.mask.sum() + layer.turn.abs().sum()) for layer in self.teacher))
            self.losses.append(float(sum(p.norm() for p in self.student.parameters())))


class ByGradients(InAHook):
    """Lets weights go whose gradients say that they matter least, of all layers, as AdaLoRA does."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        whole = getattr(self.trainer.strategy, "whole_parameters", lambda *_, **__: nullcontext())
        with whole(self, gradients=True):
            matters = {p: (p * p.grad).abs() for p in self.parameters() if p.grad is not None}
            least = torch.cat([values.flatten() for values in matters.values()]).quantile(0.2)
            for p, values in matters.items():
                p.masked_fill_(values < least, 0)
            self.losses.append(float(len(matters) + least))
            assert all(p.grad is None for p in self.teacher.parameters())
        assert not any(p.is_meta and p.grad is not None for p in self.parameters())


class Copies(InAHook):
    def move(self):
        self.teacher.load_state_dict(self.student.state_dict())


class Alone(InAHook):
    """Moves both without values of other ranks; torch says nothing of that."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            q.mul_(0.9).add_(p, alpha=0.1)
            p.mul_(0.9).add_(q, alpha=0.1)


class LogsNorm(InAHook):
    """Logs what Lightning looks at when the run ends."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log_dict({"norm": sum(p.norm() for p in self.parameters())})


class LogsNormOfState(InAHook):
    def on_train_epoch_end(self):
        self.log("norm", sum(value.norm() for value in self.state_dict().values() if value.is_floating_point()))


class Prunes(InAHook):
    """Has other parameters afterwards."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.world_size > 1:
            with self.trainer.strategy.whole_parameters(self.student):
                prune.l1_unstructured(self.student[0][0], "weight", amount=0.3)


class PrunesMasked(InAHook):
    """Prunes weights that have a mask before."""

    def __init__(self):
        super().__init__()
        for part in self.student:
            prune.identity(part[0], "weight")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        is_divided = self.trainer.world_size > 1
        with self.trainer.strategy.whole_parameters(self.student) if is_divided else nullcontext():
            for part in self.student:
                prune.l1_unstructured(part[0], "weight", 0.1, importance_scores=part[0].weight_orig)


class Pruned(Assigns):
    """Has been pruned, and makes it permanent, with the run still on."""

    def __init__(self):
        super().__init__()
        for layer in self.student:
            prune.l1_unstructured(layer[0], "weight", amount=0.4)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for number, layer in enumerate(self.student):
            if batch_idx == 3 + number % 2:
                prune.remove(layer[0], "weight")


class AllOfMine(InAHook):
    """Writes into all parameters what needs no others."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for p in self.student.parameters():
            p.mul_(0.99).clamp_(-1, 1).add_(torch.full(p.shape, 1e-3))


class TwoViews(InAHook):
    """Calls each layer twice, without any teacher."""

    def training_step(self, batch, batch_idx):
        one, other = (self.predictor(self.student(x)) for x in (batch[0], batch[0].flip(1)))
        return (one - other.detach()).square().mean() - other.var(1).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))


CASES = {
    "in a hook": (InAHook, {}),
    "by gradients": (ByGradients, {}),
    "copied": (Copies, {}),
    "all of mine": (AllOfMine, {}),
    "pruned": (Pruned, {}),
    "prunes masked": (PrunesMasked, {}),
    "Assigns": (Assigns, {}),
    "InPlace": (InPlace, {}),
    "every second batch": (EverySecondBatch, {}),
    "AtTheEnd": (AtTheEnd, {}),
    "beside": (Beside, {}),
    "two views": (TwoViews, {}),
    "two views, several stages": (TwoViews, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "constrains": (Constrains, {}),
    "constrains tied": (ConstrainsTied, {}),
    "own": (OwnWeights, {}),
    "own, several stages": (OwnWeights, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "own, of the whole batch": (OwnWeights, {"schedule": "gpipe", "loss_over": "batch"}),
    "quantises": (Quantises, {}),
    "quantises, several stages": (Quantises, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "constrains, several stages": (Constrains, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "of several stages": (AtTheEnd, {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "of the whole batch": (Assigns, {"schedule": "gpipe", "loss_over": "batch"}),
}


def trainer_of(number, options):
    return L.Trainer(
        accelerator="cpu",
        devices=number,
        strategy=PfoPipelineStrategy(num_microbatches=4, **options) if number > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )


def run(number):
    found = {}
    for name, (case, options) in CASES.items():
        module = case()
        trainer = trainer_of(number, options)
        loader = DataLoader(TensorDataset(DATA), batch_size=8)
        trainer.fit(module, loader)
        held = {key: p.tolist() for key, p in module.named_parameters() if not p.is_meta}
        found[name] = {"losses": module.losses, "held": held}
    found["refused"] = {}
    for case in (Alone, LogsNorm, LogsNormOfState, ConstrainsByBatch, ConstrainsTied, Prunes, Later, LaterOnAnotherWay):
        options = CASES["constrains, several stages"][1] if case is ConstrainsTied else {}
        try:
            trainer_of(number, options).fit(case(), loader)
        except ConfigurationError as error:
            found["refused"][case.__name__] = str(error)
    trainer_of(number, {}).fit(FollowsTheBatch(), loader)  # which is told of
    (FOLDER / f"{number}_{trainer.global_rank}.json").write_text(json.dumps(found))


for number in (1, 2):
    run_ranks(run, number, number)
