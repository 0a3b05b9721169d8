"""Losses that do not suit microbatches, on two processes; every rank writes FOLDER/rank_N.json."""

import json
import logging
import random
import sys
from collections import UserDict
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import Accuracy

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy.step.first_batch import rehearsal
from tests.ranks import run_ranks

results = {}
said = []


class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


class Running(nn.Module):
    """Each step along the first dimension sees the ones before."""

    def forward(self, x):
        return x.cumsum(0)


def layers(*more, width=4):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *more, nn.Linear(8, width))


def data(size=8):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.arange(size) % 4


def contrastive(output, target):
    a, b = nn.functional.normalize(output[:, :2], dim=1), nn.functional.normalize(output[:, 2:], dim=1)
    return nn.functional.cross_entropy(a @ b.T * 5, torch.arange(len(a)))


def noisy(output, target):
    return nn.functional.cross_entropy(output + 0.5 * torch.randn_like(output), target)


def noisy_sum(output, target):
    return nn.functional.cross_entropy(output + 0.1 * torch.randn_like(output), target, reduction="sum")


def fails(output, target):
    raise ZeroDivisionError("This loss fails.")


def of_other_samples(output, target):
    return (nn.functional.mse_loss(output, torch.zeros_like(output)) - (output[0] - output[-1]).square().mean()).sin()


def penalised(output, target):
    """Differentiates by itself, and sums what it finds over samples."""
    (gradient,) = torch.autograd.grad(sum_(output, target), output, create_graph=True)
    return mean(output, target) + gradient.square().sum()


mean = nn.functional.cross_entropy
sum_ = nn.CrossEntropyLoss(reduction="sum")
weighted = nn.CrossEntropyLoss(torch.tensor([1.0, 1.5, 1.1, 0.7]))


class Experts(nn.Module):
    """Mixes two experts for each sample, and returns how much of each beside the mixture."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
        self.router = nn.Linear(8, 2)

    def forward(self, x):
        shares = self.router(x).softmax(1)
        mixed = sum(shares[:, i, None] * expert(x) for i, expert in enumerate(self.experts))
        return torch.cat([mixed, shares], 1)


def with_experts():
    return nn.Sequential(*layers()[:-1], Experts())


def balanced(output, target):
    """With a loss that balances the load of experts over the samples, as that of Mixtral."""
    shares = output[:, 4:]
    chosen = nn.functional.one_hot(shares.argmax(1), 2).float().mean(0)
    return mean(output[:, :4], target) + 0.005 * 2 * (chosen * shares.mean(0)).sum()


class CalledTwice(nn.Module):
    """Two views of each sample go through the layers, one after the other."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x):
        return self.layers(x), self.layers(x.flip(1))


def of_both(outputs, target):
    return mean(outputs[0], target) + mean(outputs[1], target)


def by_themselves(outputs, target):
    """As large on every batch; its gradients are not."""
    return sum(each / each.detach() for each in (mean(output, target) for output in outputs))


class OtherInEval(nn.Module):
    """As models that return predictions in eval mode, and in training what the loss needs."""

    def forward(self, x):
        return x if self.training else x.argmax(1)


class NeedsGraph(nn.Module):
    """Does not run forward only."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            raise ValueError("this layer is for training")
        return x


def of_replica(output, target):
    return mean(output, target, reduction="sum" if dist.get_rank() else "mean")


def ragged(output, target):
    return mean(output, torch.where(target > 2, -100, target))


def hardest(output, target):
    """The mean over the harder half."""
    losses = (target + 0.001 * output.mean(1)).square()
    return losses.topk(len(losses) // 2).values.mean()


def masked(output, target):
    """A mean over what is no padding."""
    kept = target != PADDING
    return (mean(output, target.where(kept, 0), reduction="none") * kept).sum() / kept.sum()


PADDING = 9
WEIGHTS = {"samples": "samples", "labels": lambda part: (part[1] != -100).sum()}
WHOLE = {"loss_over": "batch", "schedule": "gpipe"}
CASES = {
    "mean": (layers, mean, {}),
    "dropout, batch norm": (lambda: layers(nn.Dropout(0.4), nn.BatchNorm1d(8)), mean, {}),
    "noise": (layers, noisy, {}),
    "called twice": (CalledTwice, of_both, {}),
    "called twice, by themselves": (CalledTwice, by_themselves, {}),
    "one sample each": (layers, mean, {"num_microbatches": 8}),
    "sum": (layers, sum_, {}),
    "sum of noise": (layers, noisy_sum, {}),
    "sum, other in eval": (lambda: layers(OtherInEval()), sum_, {}),
    "no loss": (layers, lambda output, target: None, {}),
    "sum, not forward only": (lambda: layers(NeedsGraph()), sum_, {}),
    "sum, unchecked": (layers, sum_, {"check_loss": False}),
    "whole batch": (layers, sum_, {"num_microbatches": 1, "schedule": "gpipe"}),
    "contrastive, one sample each": (layers, contrastive, {"num_microbatches": 8}),
    "contrastive": (layers, contrastive, {}),
    "sum of gradients": (layers, penalised, {}),
    "one for each sample": (layers, nn.CrossEntropyLoss(reduction="none"), {"num_microbatches": 8}),
    "class weights": (layers, weighted, {}),
    "whole, class weights": (layers, weighted, WHOLE),
    "labels with gaps": (layers, ragged, {}),
    "whole, labels with gaps": (layers, ragged, WHOLE),
    "experts": (with_experts, balanced, {}),
    "whole, experts": (with_experts, balanced, WHOLE),
    "time first": (lambda: layers(Running()), mean, {}),
    "sum, whole batch too large": (lambda: layers(FixedSize()), sum_, {}),
    "sum, only by microbatches": (lambda: layers(FixedSize()), sum_, {"num_microbatches": 2}),
    "sum in one replica": (layers, of_replica, {"data_parallel_size": 2}),
    "not two-dimensional": (layers, of_other_samples, {}),
    "whole, contrastive": (layers, contrastive, WHOLE),
    "whole, compared too early": (lambda: layers(Running()), mean, WHOLE),
    "whole, noise before": (lambda: Noisy(layers()), mean, WHOLE),
    "whole, noise needed later": (lambda: Denoising(layers(width=6)), None, WHOLE),
    "whole, failing loss": (layers, fails, WHOLE),
    "whole, failing layer": (lambda: layers(Failing()), mean, WHOLE),
    "whole, backwards too early": (layers, contrastive, {"loss_over": "batch"}),
}


class Noisy(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x + torch.randn_like(x))


class Denoising(Noisy):
    def forward(self, x, target):
        noise = torch.randn_like(x)
        return nn.functional.mse_loss(self.layers(x + noise), noise)


class Failing(nn.Module):
    """Fails in training, not in evaluation."""

    def forward(self, x):
        if self.training and not x.is_meta and x.abs().sum() > 0:
            raise ArithmeticError("This layer fails.")
        return x


class FixedSize(nn.Module):
    """Refuses the whole batch."""

    def forward(self, x):
        if len(x) > 4:
            raise ValueError(f"{len(x)} samples are too many.")
        return x


def with_gaps():
    """No label is left of some microbatches."""
    x, labels = data()
    return x, labels.masked_fill(torch.arange(8) < 3, -100)


def run_case(make, loss_fn, options, steps=2, batches=None):
    said.clear()
    found, model = {"losses": []}, None
    try:
        model = PipelinedModel(make(), loss_fn, **{"num_microbatches": 4, **options})
        for batch in batches or [data()] * steps:
            found["losses"].append(float(model.step(*batch)))
    except (PfoError, ArithmeticError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    if model is not None:
        model.release()  # what it has changed of torch.distributed too
    found["said"] = list(said)
    return found


class Stateful(nn.Module):
    """Keeps what steps leave: a count, a list, a metric, running statistics, random numbers of its own."""

    def __init__(self):
        super().__init__()
        self.layers = layers(nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.accuracy = Accuracy("multiclass", num_classes=4)
        self.register_buffer("ema", torch.zeros(4))
        self.count, self.history, self.random = 0, [], random.Random(5)
        self.generator = torch.Generator().manual_seed(6)

    def forward(self, x, y):
        output = self.layers(x)
        self.count += 1
        self.ema.mul_(0.9).add_(output.detach().mean(0))
        self.accuracy.update(output, y)
        weight = 1 + torch.rand(1, generator=self.generator).item() + self.random.random()
        loss = nn.functional.cross_entropy(output, y) * weight + 0 * self.ema.sum()
        self.history.append(loss.item())
        return loss


def stateful(check_loss):
    module = Stateful()
    model = PipelinedModel(module, pipeline_module="layers", num_microbatches=4, check_loss=check_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    losses = []
    for _ in range(17):
        losses.append(float(model.step(*data())))
        optimizer.step()
        optimizer.zero_grad()
    held = {name: value.tolist() for name, value in module.state_dict().items() if not value.is_meta}
    confused = module.accuracy.tp.tolist()
    return [losses, module.count, module.history, confused, held, module.training, torch.rand(2).tolist()]


def not_a_number():
    def logarithm(output, target):
        return (output.sum() - output.sum().detach() - 1).log()

    def sometimes(output, target):
        return mean(output, torch.where(target < 2, target, -100))

    def run(loss_fn, x, y, make=layers):
        said.clear()
        model = PipelinedModel(make(), loss_fn, num_microbatches=4)
        try:
            return [float(model.step(x, y)), *said]
        except PfoError as error:
            return [f"{type(error).__name__}: {error}", *said]

    class Unwraps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers()

        def forward(self, form):
            return self.layers(torch.as_tensor(form["x"]))

    def broken():
        model = layers()
        model[2].weight.data[0] = float("nan")
        return model

    x, y = data()
    bad = x.clone()
    bad[3, 2] = float("nan")
    return {
        "loss": run(logarithm, x, y),
        "microbatch": run(sometimes, x, y),
        "batch": run(mean, bad, y),
        "form": run(mean, UserDict(x=bad), y, Unwraps),
        "array": run(mean, {"x": bad.numpy()}, y, Unwraps),
        "parameters": run(mean, x, y, broken),
        "infinite": run(lambda output, target: output.square().sum() * float("inf"), x, y),
    }


def main():
    logging.getLogger("lightning_pfo").addHandler(Listener())
    for name, (make, loss_fn, options) in CASES.items():
        results[name] = run_case(make, loss_fn, options)
    with patch.object(rehearsal, "_LARGEST_BYTES", 1):
        results["sum, large outputs"] = run_case(layers, sum_, {})
    later = [data(), with_gaps(), with_gaps()]
    for how in WEIGHTS:
        results[f"gaps later, {how}"] = run_case(layers, mean, {"microbatch_weight": WEIGHTS[how]}, batches=later)
    x, labels = data()
    later = [(x, labels)] * 15 + [(x, labels.masked_fill(torch.arange(8) % 3 == 0, PADDING))]
    results["mask later"] = run_case(layers, masked, {}, batches=later * 4)
    soon = [(x, labels)] * 3 + [(x, labels.masked_fill(torch.arange(8) == 0, PADDING))]
    results["mask soon"] = run_case(layers, masked, {}, batches=soon * 2)
    orders = [3, 0, 3, 0, 3, 0, 3, 0], [3, 3, 3, 3, 0, 0, 0, 0]  # one of the hardest in each microbatch, and not
    results["hardest"] = run_case(layers, hardest, {}, batches=[(x, torch.tensor(order)) for order in orders])
    results["noise later"] = run_case(layers, noisy, {}, steps=16)
    results["stateful"] = [stateful(True), stateful(False)]
    results["nan"] = not_a_number()
    Path(sys.argv[1], f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
