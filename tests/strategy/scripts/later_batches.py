"""Trains and evaluates, on one and on four ranks, steps that do other things than the first; writes OUTPUT/*.json."""

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
X = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    """A layer with an adapter that can be switched off, and a buffer that others may have too."""

    def __init__(self, mask):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.adapter = nn.Parameter(torch.zeros(8, 8))
        self.on = True
        self.register_buffer("mask", mask)

    def forward(self, x):
        return torch.tanh(self.linear(x * self.mask) + (x @ self.adapter if self.on else 0))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def penalty(self, x):
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.forward(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=-1) - 1).square().mean()


class Base(L.LightningModule):
    """`use` says what is done besides; `early` that it is done in the first batch too, times 0."""

    def __init__(self, use="nothing", early=False):
        super().__init__()
        torch.manual_seed(0)
        masks = torch.tensor([1.0, 0.0] * 4), torch.tensor([0.0, 1.0] * 4)
        self.layers = nn.Sequential(*(Layer(masks[index % 2]) for index in range(6)))
        self.use, self.early = use, early
        self.found, self.seen = [], []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.found.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class SwitchedBack(Base):
    """Switches adapters off for a reference, and on again behind the last call."""

    def training_step(self, batch, batch_idx):
        y = self.layers(batch)
        for layer in self.layers:
            layer.on = False
        with torch.no_grad():
            reference = self.layers(batch)
        for layer in self.layers:
            layer.on = True
        return (y - batch).square().mean() + 10 * (y - reference).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        assert all(layer.on for layer in self.layers)


class CallsLess(Base):
    """Calls a critic in training only; evaluates by loader and by batch."""

    def __init__(self):
        super().__init__()
        self.critic = Critic()

    def training_step(self, batch, batch_idx):
        y = self.layers(batch)
        return self.critic(y).mean() + self.critic.penalty(batch)

    def validation_step(self, batch, batch_idx, dataloader_idx):
        loss = self.layers(batch).square().mean()
        if dataloader_idx == 0 or batch_idx == 1:
            loss = loss + self.layers(2 * batch).square().mean()
        self.log("validated", loss)

    def predict_step(self, batch, batch_idx):
        return self.layers(batch)


class UsesWeights(Base):
    """Uses the weights of the first layer beside the layers, from the second batch on."""

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        weight = self.layers[0].linear.weight
        loss = (x - batch).square().mean()
        if self.early:
            loss = loss + 0 * weight.sum()
        if batch_idx > 0:
            if self.use == "log":
                self.log("norm", weight.norm())
            if self.use == "number":
                self.log("norm", float(weight.norm()))
            if self.use == "return":
                return {"loss": loss, "other": (x.detach() @ weight).mean()}
            if self.use == "keep":
                self.seen.append((x.detach() @ weight).mean())
            if self.use == "loss":
                loss = loss + (x @ weight).square().mean()
        return loss


class Numbers(Base):
    """Logs and counts what is no mean: from the second batch on, or what is 0 in the first one."""

    def __init__(self, use):
        super().__init__(use)
        self.count = 0

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        seen = x if self.use == "rare" else x * (batch_idx > 0)
        if batch_idx > 0 or self.use == "zero":
            self.log("largest", seen.max())
            self.count += int((seen > 0).sum())
        return x.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.found += [self.count, float(self.trainer.callback_metrics.get("largest", 0))]


class Counts(Base):
    """Logs counts that it keeps, before and after it counts on; beside them a constant that one is equal to once."""

    def __init__(self):
        super().__init__("counts")
        self.seen = self.positive = self.batches = self.either = 0
        self.kept = {"seen": 0}  # which a hook takes away
        self.register_buffer("numbers", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        self.log("seen before", float(self.seen))
        self.seen += len(batch)
        self.batches += 1
        self.either += len(batch) if batch_idx < 2 else 1
        if self.kept is not None:
            self.kept["seen"] += len(batch)
        self.log("kept", float(self.kept["seen"] if self.kept else 0))
        self.numbers += batch.numel()
        self.positive += int((x[:, 0] > 0.5).sum())
        self.log_dict({"seen": float(self.seen), "batches": float(self.batches), "numbers": self.numbers.float()})
        self.log_dict({"positive": float(self.positive), "constant": 4.0, "size": float(len(batch))})
        self.log("all seen", self.seen, reduce_fx="max")
        return x.square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.found += [self.either, *(float(value) for value in self.trainer.callback_metrics.values())]
        self.kept = self.kept if batch_idx == 0 else None


class AlikeAtFirst(Base):
    """Logs the largest of what all samples of the first batches have alike; hooks see that of the latest batches."""

    def train_dataloader(self):
        lengths = torch.arange(80) % 7
        lengths[:20] = 6
        return DataLoader([(X[index % 12], lengths[index].float()) for index in range(80)], batch_size=4)

    def training_step(self, batch, batch_idx):
        x, lengths = batch
        self.log("longest", lengths.max())
        return self.layers(x).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx > 14:  # the sixteenth is compared
            self.found.append(float(self.trainer.callback_metrics["longest"]))


class Derivatives(nn.Module):
    """Most of the weights, and what differentiates them by the input."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        x = x.detach().requires_grad_(True)
        y = self.net(x)
        return y, torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class Differentiates(Base):
    """As a network that is informed by physics; other layers are small."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 8))
        self.derivatives = Derivatives()

    def training_step(self, batch, batch_idx):
        y, slope = self.derivatives(batch)
        return (slope * y).square().mean() + (self.layers(y) - batch).square().mean()


class UsesLaterWeights(Base):
    """Uses the weights of the last layer before the first one, from the second batch on."""

    def training_step(self, batch, batch_idx):
        weight = self.layers[5].linear.weight
        if batch_idx > 0:
            if self.use == "number":
                self.log("norm", float(weight.norm()))
            if self.use == "loss":
                batch = batch @ weight
        return self.layers(batch).square().mean()


class Tied(Base):
    """Has a head tied to the first layer, which it calls in the second batch, or in an evaluation."""

    def __init__(self, use):
        super().__init__(use)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.layers[0].linear.weight

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        return (self.head(x) if self.use == "late" and batch_idx else x).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.head(self.layers(batch)).square().mean())


class TiedInHook(Tied):
    """Ties its head in a hook, where other stages have the first layer; or to one beside it, which trains."""

    def __init__(self, use):
        super().__init__(use)
        self.head = nn.Linear(8, 8)

    def on_fit_start(self):
        self.head.weight = self.layers[0 if self.use == "first" else 5].linear.weight

    def training_step(self, batch, batch_idx):
        return self.head(self.layers(batch)).square().mean()


class Noisy(Tied):
    """Adds noise to gradients, of which each rank draws its own."""

    def __init__(self):
        super().__init__("noise")
        self.weights = []

    def training_step(self, batch, batch_idx):
        return self.head(self.layers(batch)).square().mean()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(torch.randn_like(parameter.grad))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        pass

    def on_before_zero_grad(self, optimizer):  # the pipeline has run, and weights are still those that it has run with
        tied = self.head.weight
        self.weights.append(0.0 if tied.is_meta else float(tied.detach().sum()))


class CouplesLater(Base):
    """Calls its layers twice from the second batch on, for a loss that compares samples."""

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        if batch_idx > 0:
            y = self.layers(2 * batch)
            loss = loss + (y - y.mean(0)).square().mean()
        return loss


class Pairs(Base):
    """Compares each sample with the next: with none where a microbatch has one."""

    def training_step(self, batch, batch_idx):
        y = self.layers(batch)
        return (y[::2][: len(y) // 2] - y[1::2]).square().mean()


class OddOtherwise(Base):
    """Has another loss of an odd number of samples."""

    def training_step(self, batch, batch_idx):
        y = self.layers(batch)
        return y.abs().mean() if len(batch) % 2 else y.square().mean()


class Curriculum(Base):
    """Trains by another mean from the second epoch on, and evaluates by what is no mean then."""

    def training_step(self, batch, batch_idx):
        error = self.layers(batch) - batch
        return (error.abs() if self.current_epoch else error.square()).mean()

    def validation_step(self, batch, batch_idx):
        errors = (self.layers(batch) - batch).abs()
        self.log("error", errors.max() if self.current_epoch else errors.mean())


class EvaluatesOtherwise(Base):
    """Evaluates batches by what is no mean from the twelfth on."""

    def validation_step(self, batch, batch_idx):
        errors = (self.layers(batch) - batch).abs()
        self.log("late error", errors.max() if batch_idx > 10 else errors.mean())


class Recurrent(Base):
    """Keeps a state with a row for each sample, which microbatches of one take as it is, or one that they cannot."""

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        if batch_idx:
            x = torch.tanh(x + (self.state.view(-1, 8) if self.use == "flat" else self.state))
        self.state = x.detach().flatten() if self.use == "flat" else x.detach()
        return x.square().mean()


class LooksBack(Base):
    """Compares rows with those of the batch before where there are as many: nearly nothing at first."""

    def training_step(self, batch, batch_idx):
        x = self.layers(batch)
        loss = x.square().mean()
        if batch_idx and self.before.shape == x.shape:
            loss = loss + 1e-7 * 1e6 ** (batch_idx - 1) * (x - self.before).square().mean()
        self.before = x.detach()
        return loss


class Stateful(Base):
    """Cells whose states have a row for each sample, in the second dimension of some; a hook may make the first."""

    def __init__(self, use="cells", early=False):
        super().__init__(use, early)
        is_cell = use == "cells"
        self.layers = nn.ModuleList(nn.GRUCell(8, 8) if is_cell else nn.LSTM(8, 8, batch_first=True) for _ in range(4))
        self.states = None

    def on_train_epoch_start(self):
        if self.early:
            zeros = torch.zeros(4, 8) if self.use == "cells" else (torch.zeros(1, 4, 8),) * 2
            self.states = [zeros] * 4

    def training_step(self, batch, batch_idx):
        x, states, now = batch if self.use == "cells" else batch[:, None], self.states or [None] * 4, []
        for layer, state in zip(self.layers, states, strict=True):
            if self.use == "cells":
                x = state = layer(x, state)
                now.append(state.detach())
            else:
                x, state = layer(x, state)
                now.append({"both": tuple(part.detach() for part in state)})
        self.states = now if self.use == "cells" else [each["both"] for each in now]
        return x.square().mean()


class GoesOn(Stateful):
    """Evaluates with states of the batch before, where that had as many samples."""

    def validation_step(self, batch, batch_idx):
        x, states = batch, self.states or [None] * 4
        states = [None if state is None or len(state) != len(batch) else state for state in states]
        self.states = []
        for layer, state in zip(self.layers, states, strict=True):
            x = layer(x, state)
            self.states.append(x)
        self.log("loss", x.square().mean())


class Bank(Base):
    """Keeps a row for each sample of the data set, and takes up the states of a batch with as many samples."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.ones(len(X), 8))
        self.kept = None

    def training_step(self, batch, batch_idx):
        x, indices = batch
        y = self.layers(x)
        loss = nn.functional.cross_entropy(y @ self.bank.clone().T, indices)
        self.bank[indices] = 0.5 * self.bank[indices] + y.detach()
        if self.kept is not None and len(self.kept) == len(x):
            loss = loss + (y - self.kept).square().mean()
        self.kept = y.detach()
        return loss


class Remembers(Base):
    """Keeps the rows that its layers were given for the next batch, in a buffer that is there before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("memory", torch.zeros(6, 4, 3, 8))

    def training_step(self, batch, batch_idx):
        x, now = batch[:, None].repeat(1, 3, 1), []
        for layer, memory in zip(self.layers, self.memory, strict=True):
            now.append(x.detach())
            x = layer(x) + memory.mean(1, keepdim=True)
        self.memory = torch.stack(now)
        return x.square().mean()


class Scripted(Base):
    def __init__(self):
        super().__init__()
        self.layers[1].linear = torch.jit.script(self.layers[1].linear)

    training_step = SwitchedBack.training_step


class ScalesInPlace(Base):
    """Divides its loss by a buffer that it changes in place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        return loss / self.scale.mul_(0.9).add_(loss.detach())


class Attacks(Base):
    """Differentiates by its input, itself."""

    def training_step(self, batch, batch_idx):
        batch = batch.clone().requires_grad_(True)
        self.layers(batch).square().sum().backward()
        return self.layers(batch + batch.grad.sign()).square().mean()


class TwoBackwards(Base):
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def backward(self, loss):
        loss.backward(retain_graph=True)
        loss.backward()


class SetInHook(Base):
    """Reads an attribute that a hook sets, before it calls layers in another order, or before weights are copied."""

    def __init__(self, use):
        super().__init__(use)
        self.before = nn.Linear(8, 8)

    def on_train_batch_start(self, batch, batch_idx):
        self.rate = 1.0 + batch_idx

    def training_step(self, batch, batch_idx):
        if self.use == "order":
            rate = self.rate
            return rate * self.layers(self.layers[5](self.before(batch))).square().mean()
        rate = self.rate  # which the look at the first batch does not find
        self.layers[5].linear.load_state_dict(self.layers[0].linear.state_dict())
        return rate * self.layers(batch).square().mean()


class Grows(Base):
    """Gets a copy of itself when training begins, which follows it; and another layer in the second epoch, to train."""

    def on_train_start(self):
        self.copy = copy.deepcopy(self.layers)

    def on_train_epoch_start(self):
        if self.use == "grows" and self.current_epoch:
            torch.manual_seed(1)
            self.layers[5].linear = nn.Linear(8, 8)
            self.optimizers().add_param_group({"params": self.layers[5].linear.parameters()})

    def training_step(self, batch, batch_idx):
        return (self.layers(batch) - batch).square().mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for mine, other in zip(self.layers.parameters(), self.copy.parameters(), strict=True):
            other.data.lerp_(mine.data, 0.5)


class Anchored(Base):
    """Is held near the weights that it had at the end of an epoch (elastic weight consolidation)."""

    anchors = None

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch).square().mean()
        if self.anchors is not None:
            loss = loss + sum((p - self.anchors[name]).square().sum() for name, p in self.layers.named_parameters())
        return loss

    def on_train_epoch_end(self):
        whole = getattr(self.trainer.strategy, "whole_parameters", nullcontext)
        with whole():
            self.anchors = {name: p.detach().clone() + 0.1 for name, p in self.layers.named_parameters()}


class TwoViews(Base):
    """Sees two views of a batch, one after the other, and decides at the end by what layers have computed."""

    def training_step(self, batch, batch_idx):
        first, second = self.layers(batch), self.layers(batch.flip(1))
        loss = (first - batch).square().mean() + (first - second).square().mean()
        large = first[first > 0.1]
        if len(large):
            loss = loss + 0.1 * large.sum() / first.numel()
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", self.training_step(batch, batch_idx))


def make_trainer(devices, epochs=1):
    strategy = PfoPipelineStrategy(num_microbatches=4) if devices > 1 else "auto"
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def loader():
    return DataLoader(X, batch_size=4)


def pairs():
    """The last batch is short, but of pairs."""
    return DataLoader(X.repeat(9, 1)[: 4 * 8 + 6], batch_size=8)


def train(module, devices, epochs=1):
    trainer = make_trainer(devices, epochs)
    validated = loader() if isinstance(module, Tied) and module.use == "evaluation" else None
    trainer.fit(module, None if isinstance(module, AlikeAtFirst) else loader(), validated)
    return [*module.found, *map(float, trainer.callback_metrics.values())]


def refusal(module, devices, epochs=1):
    try:
        return repr(train(module, devices, epochs))
    except ConfigurationError as error:
        return str(error)


def equal_to_one_device(devices):
    found = {"switched back": train(SwitchedBack(), devices)}
    module, trainer = CallsLess(), make_trainer(devices)
    trainer.fit(module, loader())
    found["calls less"] = module.found
    found["predicted"] = torch.cat(trainer.predict(module, loader())).flatten().tolist()
    results = make_trainer(devices).validate(CallsLess(), [loader(), loader()], verbose=False)
    found["validated"] = [value for result in results for value in result.values()]
    (result,) = make_trainer(devices).validate(GoesOn(), loader(), verbose=False)
    found["goes on"] = [*result.values()]
    for use in ("log", "number", "loss"):
        found[use] = train(UsesWeights(use, early=True), devices)
    for use in ("log", "number", "return", "keep", "loss"):
        found[f"late {use}"] = train(UsesWeights(use), devices)
    found |= {f"{use} numbers": train(Numbers(use), devices) for use in ("rare", "zero")}
    found["alike numbers"] = train(AlikeAtFirst(), devices)
    found["counts"] = train(Counts(), devices)
    found["differentiates"] = train(Differentiates(), devices)
    found["couples later"] = train(CouplesLater(), devices)
    for use in ("cells", "in the second dimension"):
        found[use] = train(Stateful(use), devices)
        found[f"{use}, prepared"] = train(Stateful(use, early=True), devices, epochs=2)
    found["memory"] = train(Remembers(), devices, epochs=2)
    make_trainer(devices, epochs=2).fit(module := Bank(), DataLoader([*zip(X, range(len(X)), strict=True)], 4))
    found["bank"] = module.found
    make_trainer(devices).fit(module := Pairs(), pairs())
    found["pairs"] = module.found
    found["rows of one"] = train(Recurrent(), devices)
    found["small at first"] = train(LooksBack(), devices)
    module, trainer = Curriculum(), make_trainer(devices, epochs=2)
    trainer.fit(module, loader(), loader())
    found["curriculum"] = [*module.found, float(trainer.callback_metrics["error"])]
    module = TwoViews()  # divided by its validation
    (result,) = make_trainer(devices).validate(module, loader(), verbose=False)
    found["two views after validation"] = [*result.values(), *train(module, devices)]
    found["is copied"] = train(Grows(), devices)
    found["is anchored"] = train(Anchored(), devices, epochs=2)
    found["copies weights"] = train(SetInHook("copy"), devices)
    found["tied in a hook"] = train(TiedInHook("last"), devices)
    found["tied evaluation"] = train(Tied("evaluation"), devices)
    return found


def main():
    found = equal_to_one_device(4)
    noisy = Noisy()
    train(noisy, 4)
    refused = {use: refusal(UsesLaterWeights(use), 4) for use in ("number", "loss")}
    refused |= {"tied late": refusal(Tied("late"), 4), "tied in a hook": refusal(TiedInHook("first"), 4)}
    # which is told of
    make_trainer(4).validate(EvaluatesOtherwise(), DataLoader(X.repeat(7, 1), batch_size=4), verbose=False)
    train(Recurrent("flat"), 4)  # which is told of
    # its last batch has microbatches of 3 and of 2; which is told of
    make_trainer(4).fit(OddOtherwise(), DataLoader(X.repeat(9, 1)[: 4 * 8 + 7], batch_size=8))
    refused["grows"] = refusal(Grows("grows"), 4, epochs=2)
    refused["hook, order"] = refusal(SetInHook("order"), 4)
    refused["scripted"] = refusal(Scripted(), 4)
    refused["in place"] = refusal(ScalesInPlace(), 4)
    refused["attacks"] = refusal(Attacks(), 4)
    refused["backwards"] = refusal(TwoBackwards(), 4)
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(
        json.dumps({"found": found, "refused": refused, "noisy": noisy.weights})
    )


(FOLDER / "one_device.json").write_text(json.dumps(equal_to_one_device(1)))
run_ranks(main, 4)
