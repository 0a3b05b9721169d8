"""Steps that optimize by themselves, on a pipeline and on one device; writes OUTPUT/rank_N.json.

Usage: manual.py FOLDER RANKS [CASE...].
"""

import copy
import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER, RANKS = Path(sys.argv[1]), int(sys.argv[2])
STEPS = 8


class Module(L.LightningModule):
    """As in Lightning's documentation: one backward, clipping, a step, a scheduler."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)), nn.Linear(8, 4))
        self.seen = {"loss": [], "lr": [], "logged": [], "step": [], "hooks": [], "outputs": [], "given": []}

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.log("step", float(self.trainer.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [lr_scheduler.StepLR(optimizer, 2, 0.7)]

    def on_before_zero_grad(self, optimizer):
        self.seen["hooks"].append("on_before_zero_grad")

    def on_before_backward(self, loss):
        self.seen["hooks"].append("on_before_backward")
        self.seen["given"].append(float(loss))

    def on_after_backward(self):
        self.seen["hooks"].append("on_after_backward")

    def on_before_optimizer_step(self, optimizer):
        self.seen["hooks"].append(f"on_before_optimizer_step of {len(optimizer.param_groups[0]['params'])}")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.seen["logged"].append(metrics)
        optimizers = self.optimizers() if isinstance(self.optimizers(), list) else [self.optimizers()]
        self.seen["lr"].append([group["lr"] for optimizer in optimizers for group in optimizer.param_groups])
        self.seen["step"].append(self.trainer.global_step)
        self.seen["outputs"].append({key: float(value) for key, value in (outputs or {}).items()})


class Accumulates(Module):
    """Every third batch makes a step; it returns its loss."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss / 3)
        if (batch_idx + 1) % 3 == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "twice": 2 * loss}


class Couples(Module):
    """Its loss is none of microbatches."""

    def loss(self, batch):
        output = self.net(batch[0])
        return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))


class TwoOptimizers(Module):
    """Each has a part of the parameters, one backward serves both; one of them waits."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        self.log("loss", loss, prog_bar=True)
        first.step()
        if batch_idx % 2:
            second.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        return loss

    def configure_optimizers(self):
        first = torch.optim.AdamW(self.net[:2].parameters(), 0.01)
        second = torch.optim.SGD(self.net[2:].parameters(), 0.1, momentum=0.9)
        return [first, second], [lr_scheduler.CosineAnnealingLR(first, 8), lr_scheduler.LinearLR(second)]


class Toggles(TwoOptimizers):
    """The optimizers take turns; the other one's parameters need no gradients."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        self.toggle_optimizer(optimizer)
        loss = self.loss(batch)
        self.log("loss", loss)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.untoggle_optimizer(optimizer)


class TogglesModel(TwoOptimizers):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        with optimizer.toggle_model(sync_grad=bool(batch_idx % 3)):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class SetsRates(Module):
    """Warms up by hand, and lets a plateau of its loss decide; zeroes gradients as modules do."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=False)
        self.net.zero_grad()
        loss = self.loss(batch)
        if batch_idx < 3:
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (batch_idx + 1)
        self.log("lr", optimizer.param_groups[0]["lr"])
        self.manual_backward(loss)
        optimizer.step()
        if batch_idx >= 3:
            self.lr_schedulers().step(loss.detach())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": plateau}


class ReadsLogged(SetsRates):
    """A plateau of what it has logged, as Lightning's docs have it in a hook."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss)
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step(self.trainer.callback_metrics["loss"])


class TwoLosses(Module):
    """Two backwards before one step add up."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        logits = self.net(batch[0])
        self.manual_backward(nn.functional.cross_entropy(logits, batch[1]), retain_graph=True)
        self.manual_backward(0.1 * logits.square().mean())
        optimizer.step()
        optimizer.zero_grad()


class Skips(Module):
    """Some batches have no backward."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 1:
            return
        super().training_step(batch, batch_idx)


class Looks(Module):
    """Some batches return something without a backward, the first one too."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3:
            return super().training_step(batch, batch_idx)
        loss = self.loss(batch)
        self.log("loss", loss)
        self.optimizers().step()
        return {"loss": loss, "batch": batch_idx}


class OnlyLooks(Module):
    """No batch has a backward, and one only calls layers that nobody else does."""

    def training_step(self, batch, batch_idx):
        return {"mean": self.net[:3](batch[0]).mean()} if batch_idx == 5 else self.loss(batch)


class Whole(Module):
    """A loss that compares samples."""

    def loss(self, batch):
        logits = nn.functional.normalize(self.net(batch[0]))
        return nn.functional.cross_entropy(logits @ logits.T, torch.arange(len(logits)))


class Half(Module):
    """Gradients too small for 16 bits, but for their scale."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.loss(batch) * 1e-4
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e3)


class Generates(Module):
    """A generator and a discriminator take turns, so that batches call other parts of the model."""

    def __init__(self):
        super().__init__()
        self.judge = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)), nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        generator, judge = self.optimizers()
        optimizer = judge if batch_idx % 2 else generator
        optimizer.zero_grad()
        if batch_idx % 2:
            made = self.net(batch[0]).detach()
            loss = self.judge(torch.cat([made, batch[0][:, :4]])).sigmoid().mean()
            self.log("judge_loss", loss)
        else:
            loss = -self.judge(self.net(batch[0])).sigmoid().mean()
            self.log("generator_loss", loss)
        self.manual_backward(loss)
        optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.02) for part in (self.net, self.judge)]


class Adversarial(TwoOptimizers):
    """Another backward for weights that the first step does not change."""

    def other(self, batch):
        return self.net[2:](batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        self.manual_backward(self.other(batch))
        second.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()


class Gan(Module):
    """As in Lightning's examples: a generator's phase, then a discriminator's, which makes samples anew."""

    def __init__(self):
        super().__init__()
        self.judge = nn.Sequential(
            nn.Linear(4, 8), nn.LeakyReLU(0.2, inplace=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )

    def bce(self, logits, label):
        return nn.functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        real = batch[0][:, :4]
        self.toggle_optimizer(opt_g)
        g_loss = self.bce(self.judge(self.net(batch[0])), 1.0)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        real_loss = self.bce(self.judge(real), 1.0)
        fake_loss = self.bce(self.judge(self.net(batch[0]).detach()), 0.0)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.02) for part in (self.net, self.judge)]


class AddsUp(Gan):
    """Adds a loss of its second phase up over samples."""

    def bce(self, logits, label):
        return super().bce(logits, label) * (1 if label else len(logits))


class ReusesFake(Gan):
    """Samples of the first phase are used in the second; the generator is looked at through what it was."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.net(batch[0])
        g_loss = self.bce(self.judge(fake), 1.0)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        opt_g.step()
        d_loss = self.bce(self.judge(batch[0][:, :4]), 1.0) + self.bce(self.judge(fake.detach()), 0.0)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})
        return {"fake": fake.mean(), "loss": g_loss.detach()}


class JudgeFirst(Gan):
    """As in PyTorch's tutorial: the generator's backward goes through samples made before the discriminator's step."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.net(batch[0])
        opt_d.zero_grad()
        self.manual_backward(self.bce(self.judge(batch[0][:, :4]), 0.9))
        self.manual_backward(self.bce(self.judge(fake.detach()), 0.1))
        opt_d.step()
        opt_g.zero_grad()
        g_loss = self.bce(self.judge(fake), 1.0)
        self.manual_backward(g_loss)
        opt_g.step()
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log("lr", opt_d.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizers = super().configure_optimizers()
        return optimizers, [lr_scheduler.StepLR(optimizer, 2, 0.7) for optimizer in optimizers]


class Critics(Gan):
    """As in WGAN: several steps of the critic, each with a learning rate of its own, before one of the generator."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        scheduler = self.lr_schedulers()
        for _ in range(3):
            opt_d.zero_grad()
            fake = self.net(batch[0]).detach()
            loss = self.judge(fake).mean() - self.judge(batch[0][:, :4]).mean()
            self.manual_backward(loss)
            opt_d.step()
            scheduler.step()
            self.log(f"lr of {scheduler.last_epoch % 3}", opt_d.param_groups[0]["lr"])
            self.log(f"step {_}", float(self.trainer.global_step))
        self.log("loss", loss.item())
        opt_g.zero_grad()
        self.manual_backward(-self.judge(self.net(batch[0])).mean())
        opt_g.step()

    def configure_optimizers(self):
        opt_g, opt_d = super().configure_optimizers()
        return [opt_g, opt_d], [lr_scheduler.ExponentialLR(opt_d, 0.9)]


class Penalised(Gan):
    """As in WGAN-GP: the critic is differentiated by samples between real and made ones."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        real, share = batch[0][:, :4], batch[0][:, 4:5].sigmoid()
        fake = self.net(batch[0]).detach()
        between = (share * real + (1 - share) * fake).requires_grad_(True)
        judged = self.judge(between)
        (gradient,) = torch.autograd.grad(judged, between, torch.ones_like(judged), create_graph=True)
        penalty = (gradient.norm(2, dim=1) - 1).square().mean()
        loss = self.judge(fake).mean() - self.judge(real).mean() + 10 * penalty
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        self.log("loss", loss)
        if batch_idx % 2 == 0:
            opt_g.zero_grad()
            self.manual_backward(-self.judge(self.net(batch[0])).mean())
            opt_g.step()


class Policy(Gan):
    """As in actor-critic: a weight is used by itself in the actor's phase, and all of the critic's in a penalty."""

    def __init__(self):
        super().__init__()
        self.log_std = nn.Parameter(torch.linspace(-1, 0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        action = batch[0][:, :4]
        spread = self.log_std[None].exp()  # the view is taken of the weight, too
        chance = torch.distributions.Normal(self.net(batch[0]), spread).log_prob(action).sum(-1)
        loss = -(chance * self.judge(action).detach().squeeze(-1)).mean() - 0.01 * self.log_std.sum()
        opt_g.zero_grad()
        self.manual_backward(loss)
        opt_g.step()
        self.log("std", spread.mean())
        self.log("std_after", self.log_std.exp().mean())
        size = sum(parameter.square().sum() for parameter in self.judge.parameters())
        loss = self.bce(self.judge(action) * self.scale.clamp(max=100).exp(), 1.0) + 0.01 * size
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        self.log("loss", loss)

    def configure_optimizers(self):
        actor, critic = [*self.net.parameters(), self.log_std], [*self.judge.parameters(), self.scale]
        return [torch.optim.Adam(parameters, 0.02) for parameters in (actor, critic)]


class BothLosses(Gan):
    """All is computed first, and differentiated by parts."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.net(batch[0])
        d_loss = self.bce(self.judge(batch[0][:, :4]), 1.0) + self.bce(self.judge(fake.detach()), 0.0)
        g_loss = fake.square().mean()
        opt_g.zero_grad()
        opt_d.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.manual_backward(d_loss)
        opt_d.step()


class LooksAgain(Gan):
    """Calls the model with its new weights, and gives nothing of that to a backward."""

    def training_step(self, batch, batch_idx):
        opt_g, _ = self.optimizers()
        opt_g.zero_grad()
        loss = self.net(batch[0]).square().mean()
        self.manual_backward(loss)
        opt_g.step()
        with torch.no_grad():
            self.log("after", self.net(batch[0]).square().mean())
        self.log("before", loss)


class LogsAfterwards(Module):
    """Steps twice, and logs the first loss at last."""

    def training_step(self, batch, batch_idx):
        optimizer, losses = self.optimizers(), []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(self.loss(batch))
            self.manual_backward(losses[-1])
            optimizer.step()
            self.log(f"loss_{len(losses)}", losses[-1])
        self.log("first", losses[0])


class LogsWeights(Module):
    """Looks at weights after its step."""

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("first", self.net[0][0].weight.detach().norm())
        self.log("last", self.net[5].weight.norm())
        self.log("all", sum(parameter.detach().square().sum() for parameter in self.net.parameters()))
        self.log("loss", loss)


class ThreeOptimizers(Gan):
    """Three parts take turns, the last one first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4))

    def training_step(self, batch, batch_idx):
        for index, optimizer in enumerate(self.optimizers()):
            self.toggle_optimizer(optimizer)
            if index == 0:
                loss = nn.functional.cross_entropy(self.head(batch[0]), batch[1])
            elif index == 1:
                loss = self.bce(self.judge(self.head(batch[0]).tanh()), 1.0)
            else:
                loss = self.bce(self.judge(self.net(batch[0]) + self.head(batch[0])), float(batch_idx % 2))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.02) for part in (self.head, self.judge, self.net)]


class Norms(JudgeFirst):
    """Batch norms in both parts; the generator's samples are made again for its backward."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))
        self.judge.insert(1, nn.BatchNorm1d(8))


class Closures(Module):
    """Optimizers call forward and backward."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()

        def closure():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure) if batch_idx % 2 else optimizer.step(closure))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class StepsFirst(Module):
    """The gradients of the batch before."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        if batch_idx:
            optimizer.step()
            optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss)
        self.manual_backward(loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Steps(Module):
    """One step for each batch."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 0.01)


class Automatic(Steps):
    """The same, by Lightning."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


class Clips(Module):
    """Looks at gradients."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.optimizers().step()


class Averages(Module):
    """Looks at new weights."""

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.average = [p.detach().clone() for p in self.net[5].parameters()]
        self.log("norm", self.average[0].norm())


class Targets(Gan):
    """As in soft actor-critic: a target network follows the critic within the step, and so does a copy now and then."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.judge).requires_grad_(False)
        self.copied = copy.deepcopy(self.judge).requires_grad_(False)

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        real = batch[0][:, :4]
        with torch.no_grad():
            wanted = self.target(real) + self.copied(real) + 0.1
        loss = (self.judge(real) - wanted).square().mean()
        opt_d.zero_grad()
        self.manual_backward(loss)
        opt_d.step()
        self.log("loss", loss)
        for mine, other in zip(self.judge.parameters(), self.target.parameters(), strict=True):
            other.data.copy_(0.1 * mine.data + 0.9 * other.data)
        if batch_idx % 2 == 0:
            self.copied.load_state_dict(self.judge.state_dict())
        opt_g.zero_grad()
        self.manual_backward(-self.judge(self.net(batch[0])).mean())
        opt_g.step()
        with torch.no_grad():
            self.log("after", (self.target(real) - self.copied(real)).mean())


class Follows(Module):
    """One optimizer, and an average of weights that is made after its step."""

    def __init__(self):
        super().__init__()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.register_buffer("size", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            wanted = self.average(batch[0]).softmax(-1)
        loss = self.loss(batch) + (self.net(batch[0]).softmax(-1) - wanted).square().mean()
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        with torch.no_grad():
            for mine, other in zip(self.net.parameters(), self.average.parameters(), strict=True):
                other.lerp_(mine, 0.1)
            self.size.copy_(self.net[5].weight.square().sum())


class Clamps(Gan):
    """As in WGAN."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        for parameter in self.judge.parameters():
            parameter.data.mul_(0.9).clamp_(-0.5, 0.5)


class ClampsInPlace(Gan):
    """The same, in torch's own words."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for parameter in self.judge.parameters():
                parameter.clamp_(-0.2, 0.2)


class Lbfgs(Module):
    def training_step(self, batch, batch_idx):
        self.optimizers().step(closure=lambda: self.manual_backward(self.loss(batch)))

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Stale(Gan):
    """Differentiates through weights that have changed."""

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.net(batch[0])
        self.manual_backward(fake.square().mean(), retain_graph=True)
        opt_g.step()
        self.manual_backward(self.bce(self.judge(fake), 1.0))
        opt_d.step()


class Backward(Module):
    def training_step(self, batch, batch_idx):
        self.loss(batch).backward()
        self.optimizers().step()


class Counts(Module):
    def training_step(self, batch, batch_idx):
        self.manual_backward(self.loss(batch))
        return len(batch)


class Switches(Gan):
    """Trains the judge for its own loss only, as published GANs do; a batch ends with a judge that is frozen."""

    def set_requires_grad(self, net, value):
        for parameter in net.parameters():
            parameter.requires_grad = value

    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        fake = self.net(batch[0])
        self.set_requires_grad(self.judge, True)
        d_loss = self.bce(self.judge(batch[0][:, :4]), 1.0) + self.bce(self.judge(fake.detach()), 0.0)
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.set_requires_grad(self.judge, False)
        g_loss = self.bce(self.judge(fake), 1.0)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss})


class Scaled(nn.Module):
    """Its own code gives a parameter to a module without any."""

    def __init__(self, body):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(8))
        self.soft = nn.Softplus()
        self.body = body

    def forward(self, x):
        return self.body(x * self.soft(self.gain))


class Gains(Switches):
    def __init__(self):
        super().__init__()
        self.net = Scaled(self.net)


class WeightNorm(Gains):
    """As vocoders have it: torch makes weights before each forward, of layers and of what is in these."""

    norm = staticmethod(nn.utils.weight_norm)

    def __init__(self):
        super().__init__()
        for module in [module for module in self.modules() if isinstance(module, nn.Linear)]:
            self.norm(module)


class Parametrized(WeightNorm):
    norm = staticmethod(nn.utils.parametrizations.weight_norm)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.norm(nn.Linear(8, 8)), self.net)


class SpectralNorm(Gan):
    """Layers change buffers there, in each call."""

    norm = staticmethod(nn.utils.spectral_norm)

    def __init__(self):
        super().__init__()
        for module in [module for module in self.modules() if isinstance(module, nn.Linear)]:
            self.norm(module)


class ParametrizedSpectralNorm(SpectralNorm):
    norm = staticmethod(nn.utils.parametrizations.spectral_norm)


class Sam(Module):
    """Needs gradients at other weights than those of the loss that was differentiated before."""

    class Optimizer(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure):
            held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            uphill = [0.05 * p.grad for p in held]
            torch._foreach_add_(held, uphill)
            with torch.enable_grad():
                closure()
            torch._foreach_sub_(held, uphill)
            super().step()

    def training_step(self, batch, batch_idx):
        def closure():
            self.manual_backward(self.loss(batch))

        closure()
        self.optimizers().step(closure)

    def configure_optimizers(self):
        return self.Optimizer(self.parameters(), 0.1)


class SumsInPlace(Gan):
    """Adds up losses of several steps of an optimizer, as truncated backpropagation through time does."""

    def training_step(self, batch, batch_idx):
        opt_g, total = self.optimizers()[0], 0.0
        for _ in range(3):
            loss = self.bce(self.judge(self.net(batch[0])), 1.0)
            opt_g.zero_grad()
            self.manual_backward(loss)
            opt_g.step()
            total += loss.detach()
        self.log("total", total)


class Sums(SumsInPlace):
    """The same with what the refusal of that says."""

    def training_step(self, batch, batch_idx):
        opt_g, total, losses = self.optimizers()[0], 0.0, []
        for _ in range(3):
            loss = self.bce(self.judge(self.net(batch[0])), 1.0)
            opt_g.zero_grad()
            self.manual_backward(loss)
            opt_g.step()
            total = total + loss.detach()
            losses.append(loss.detach())
        self.log("total", total)
        self.log("mean", torch.stack(losses).mean())


class Decides(Module):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.manual_backward(loss)
        if batch[0][0, 0] > 0:
            self.optimizers().step()


class DecidesByValues(Module):
    """Steps where the loss is small enough, which some microbatches find."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        if loss.item() < 1.4:
            self.optimizers().step()


class DecidesInPhases(Gan):
    def training_step(self, batch, batch_idx):
        opt_g, opt_d = self.optimizers()
        d_loss = self.bce(self.judge(self.net(batch[0]).detach()), 0.0)
        self.manual_backward(d_loss)
        if d_loss.item() > 0.1:
            opt_d.step()
        self.manual_backward(self.bce(self.judge(self.net(batch[0])), 1.0))
        opt_g.step()


class ByHand(Module):
    def training_step(self, batch, batch_idx):
        for parameter in self.parameters():
            parameter.grad = None
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


class InAHook(Module):
    """Keeps its loss for a hook, which finds no graph behind it."""

    def training_step(self, batch, batch_idx):
        self.kept = self.loss(batch)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.manual_backward(self.kept)


class Hides(Module):
    def training_step(self, batch, batch_idx):
        hidden = torch.optim.SGD([p for p in self.net[5].parameters() if not p.is_meta] or [torch.zeros(1)], 0.1)
        self.manual_backward(self.loss(batch))
        hidden.step()


SCHEDULES = {"1f1b": {}, "gpipe": {"schedule": "gpipe"}, "interleaved": {"schedule": "interleaved_1f1b"}}
PHASES = [
    *((kind, name) for kind in (Gan, ReusesFake, JudgeFirst, Policy) for name in SCHEDULES),
    *((kind, "1f1b") for kind in (Adversarial, Critics, Penalised, BothLosses, LooksAgain, ThreeOptimizers)),
    *((kind, "1f1b") for kind in (Closures, StepsFirst, Switches, Gains, WeightNorm, Parametrized)),
    *((kind, "1f1b") for kind in (SpectralNorm, ParametrizedSpectralNorm)),
    *((kind, "1f1b") for kind in (Averages, Clamps, Targets, Follows, LogsAfterwards, LogsWeights, Sums)),
]
EQUAL = {
    f"{kind.__name__}, {name}": (kind, options)
    for kind in (Module, TwoOptimizers)
    for name, options in SCHEDULES.items()
} | {
    **{f"{kind.__name__}, 1f1b": (kind, {}) for kind in (Accumulates, Toggles, TogglesModel, SetsRates, ReadsLogged)},
    **{f"{kind.__name__}, 1f1b": (kind, {}) for kind in (TwoLosses, Skips, Looks, OnlyLooks)},
    "Accumulates, gpipe": (Accumulates, {"schedule": "gpipe"}),
    "Toggles, gpipe": (Toggles, {"schedule": "gpipe"}),
    "Module, memory": (Module, {"memory_report": True, "partition": "profile"}),
    "Whole, gpipe": (Whole, {"schedule": "gpipe", "loss_over": "batch"}),
    "Half, 1f1b": (Half, {}),
    "Generates, 1f1b": (Generates, {}),
    "Generates, gpipe": (Generates, {"schedule": "gpipe"}),
    **{f"{kind.__name__}, {name}": (kind, SCHEDULES[name]) for kind, name in PHASES},
    "Gan, memory": (Gan, {"memory_report": True, "precise_gradients": True}),
    "Norms, gpipe": (Norms, {"num_microbatches": 1, "schedule": "gpipe"}),
}
REFUSED = {
    **{k.__name__: (k, {}) for k in (Clips, Backward, Counts, Decides, ByHand, Hides, InAHook, Stale)},
    **{k.__name__: (k, {}) for k in (Couples, Lbfgs, Sam, DecidesByValues, DecidesInPhases, SumsInPlace)},
    "AddsUp": (AddsUp, {}),
    "Gan, profile": (Gan, {"partition": "profile"}),
    "Gan, joins": (Gan, {"schedule": "gpipe", "loss_over": "batch"}),
}


def fit(module, devices, max_epochs=1, path=None, **options):
    strategy = PfoPipelineStrategy(**{"num_microbatches": 4, **options}) if devices else "auto"
    generator = torch.Generator().manual_seed(1)
    inputs, labels = (
        torch.randn(12 * STEPS, 8, generator=generator),
        torch.randint(4, (12 * STEPS,), generator=generator),
    )
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=12)
    is_half = isinstance(module, Half)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices or 1,
        max_epochs=max_epochs,
        logger=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))] if is_half else None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    error = ""
    try:
        trainer.fit(module, loader, ckpt_path=path)
        trainer.save_checkpoint(FOLDER / f"{type(module).__name__} {devices} {max_epochs}.ckpt")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    held = [*module.named_parameters(), *module.named_buffers()]
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in held if not p.is_meta}
    weights = {name: tensor.flatten().tolist() for name, tensor in whole.items()}
    return {**module.seen, "weights": weights, "error": error}


def resumed(rank):
    """Each goes on from where the other has been, as a case before has left them."""
    before = FOLDER / f"TwoOptimizers {0 if RANKS == 1 else RANKS} 1.ckpt"
    found = {"Resumed, 1f1b": fit(TwoOptimizers(), RANKS, 2, FOLDER / "TwoOptimizers 0 1.ckpt")}
    return found | ({"Resumed, plain": fit(TwoOptimizers(), 0, 2, before)} if rank == 0 else {})


def replicas(rank):
    return {kind.__name__: fit(kind(), RANKS, data_parallel_size=2) for kind in (Steps, Automatic)}


def sharded(rank):
    return {
        f"{kind.__name__}, sharded {stage}": fit(kind(), RANKS, data_parallel_size=2, fully_shard=stage)
        for kind in (Steps, Gan, Clamps, ClampsInPlace)
        for stage in (False, "zero3")
    }


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rank = dist.get_rank() if dist.is_initialized() else 0
    results = {}
    for name in sys.argv[3:]:
        if name in EQUAL:
            kind, options = EQUAL[name]
            results[name] = fit(kind(), RANKS, **options)
            if f"{kind.__name__}, plain" not in results and rank == 0:
                results[f"{kind.__name__}, plain"] = fit(kind(), 0)
        elif name in REFUSED:
            kind, options = REFUSED[name]
            results[name] = fit(kind(), RANKS, **options)["error"]
        else:
            results |= {"Resumed, 1f1b": resumed, "replicas": replicas, "sharded": sharded}[name](rank)
    (FOLDER / f"rank_{rank}.json").write_text(json.dumps(results))


run_ranks(main, RANKS)
