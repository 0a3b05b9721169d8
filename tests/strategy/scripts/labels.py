"""Trainings whose losses are means over labels, with nothing said of that; every rank writes FOLDER/rank_N.json."""

import json
import logging
import sys
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.quiet import QUIET
from tests.ranks import run_ranks

LENGTH, CLASSES, BATCH, PADDING = 6, 5, 8, 1
said = []


class Named(L.LightningModule):
    """Has labels by name, and logs means over labels and over samples."""

    def __init__(self):
        super().__init__()
        hidden = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.layers = nn.Sequential(*hidden, nn.Linear(4, CLASSES))
        self.losses = []

    def loss(self, x, labels):
        return cross_entropy(self.layers(x).flatten(0, 1), labels.flatten())

    def parts_of(self, batch):
        return batch["x"], batch["labels"]

    def training_step(self, batch, batch_idx):
        loss = self.loss(*self.parts_of(batch))
        self.log("train", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        x, labels = self.parts_of(batch)
        self.log("val", self.loss(x, labels))
        self.log("size", self.layers(x).square().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Shifted(Named):
    """Has labels at a position, and predicts each by what is before it."""

    def parts_of(self, batch):
        return batch[1], batch[0]

    def loss(self, x, labels):
        return cross_entropy(self.layers(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OfSamples(Named):
    """Has labels with gaps, of which its loss is not a mean."""

    def loss(self, x, labels):
        each = cross_entropy(self.layers(x).mT, labels, reduction="none").sum(1)
        return (each / (labels != -100).sum(1).clamp(min=1)).mean()


class Alternating(Named):
    """Has means over samples and over labels by turns; its steps keep nothing."""

    def training_step(self, batch, batch_idx):
        x, labels = self.parts_of(batch)
        return self.loss(x, labels) if batch_idx % 2 else self.layers(x)[:, 0].square().mean()

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(float(outputs["loss"]))


class Twice(Named):
    """Optimizes twice in a batch, by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(*self.parts_of(batch))
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.losses.append(float(loss))


class TakingTurns(Alternating):
    """Has means over these labels and over others, whose gaps are elsewhere, by turns."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch["x"], batch["others" if batch_idx % 2 else "labels"])


class Changing(Alternating):
    """Has a sum from the second epoch on."""

    def training_step(self, batch, batch_idx):
        x = self.layers(self.parts_of(batch)[0])
        return mse_loss(x, torch.zeros_like(x), reduction="sum" if self.current_epoch else "mean")


class Mild(Named):
    """Has losses that are hardly larger or smaller, whatever labels are there, in a type of few digits."""

    def __init__(self):
        super().__init__()
        for parameter in self.layers[-1].parameters():
            parameter.data.mul_(0.01)


class Padded(Shifted):
    """Has rows that end with padding, and predicts what is none."""

    def loss(self, x, labels):
        logits, labels = self.layers(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return cross_entropy(logits, labels, ignore_index=PADDING)


class PaddedBeside(Padded):
    """Has labels beside, over which its loss is no mean."""


class Masked(Named):
    """Has a mask, over which it takes a mean by hand."""

    def parts_of(self, batch):
        return batch["x"], (batch["labels"], batch["mask"])

    def loss(self, x, labels):
        labels, mask = labels
        return (cross_entropy(self.layers(x).float().mT, labels, reduction="none") * mask).sum() / mask.sum()


class Weighted(Masked):
    """Has weights of samples."""

    def parts_of(self, batch):
        return batch["x"], (batch["labels"], batch["weights"][:, None].expand(-1, LENGTH))


class WeightedNarrowly(Weighted):
    """Has a loss in the type of its layers, which rounds to 0.4 %."""

    def loss(self, x, labels):
        labels, weights = labels
        weights = weights.to(x.dtype)
        return (cross_entropy(self.layers(x).mT, labels, reduction="none") * weights).sum() / weights.sum()


class Measured(Masked):
    """Has lengths, by which it divides."""

    def parts_of(self, batch):
        return batch["x"], (batch["labels"], batch["length"])

    def loss(self, x, labels):
        labels, length = labels
        return cross_entropy(self.layers(x).mT, labels, reduction="sum") / length.sum()


class Twofold(Masked):
    """Has the sum of a mean over labels and of another over as many positions of a mask."""

    def loss(self, x, labels):
        labels, mask = labels
        outputs = self.layers(x)
        return cross_entropy(outputs.mT, labels) + 9 * outputs[mask].square().mean()


class ByClass(Named):
    """Has classes of other weights, and a padding that has no part."""

    PADDING = PADDING

    def __init__(self):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(torch.tensor([1.0, 0.1, 2.0, 5.0, 0.5]), ignore_index=self.PADDING)

    def loss(self, x, labels):
        return self.criterion(self.layers(x).mT, labels)


class Detected(Named):
    """Has a sum over all positions, which it divides by how many are positive, as detectors do: at least by one."""

    def loss(self, x, labels):
        of_all = binary_cross_entropy_with_logits(self.layers(x)[..., 0], (labels > 0).float(), reduction="sum")
        return of_all / (labels > 0).sum().clamp(min=1)


class Boxed(Named):
    """Has as many boxes as there are in each image, and divides a sum over all by how many these are."""

    def loss(self, x, boxes):
        found = [of_one[: len(boxes_of_one)] for of_one, boxes_of_one in zip(self.layers(x), boxes, strict=True)]
        return (torch.cat(found) - torch.cat(boxes)).abs().sum() / max(sum(map(len, boxes)), 1)

    def parts_of(self, batch):
        return torch.stack(batch[0]), [target["boxes"] for target in batch[1]]


class BySample(Named):
    """Is given a list with a dict for each sample, and stacks what they have itself."""

    def parts_of(self, batch):
        return torch.stack([each["x"] for each in batch]), torch.stack([each["labels"] for each in batch])


def as_lists(samples):
    """As torchvision's detectors are given images and what is in each."""
    return [x for x, _ in samples], [target for _, target in samples]


class Unlabelled(Named):
    """Has samples without labels, which it leaves out by hand."""

    def loss(self, x, labels):
        return cross_entropy(self.layers(x)[labels >= 0], labels[labels >= 0])


class Missing(Named):
    """Has targets some of which are not there, which it leaves out by hand."""

    def loss(self, x, labels):
        there = ~labels.isnan()
        return (self.layers(x).mean(-1)[there] - labels[there]).square().mean()


class Chosen(Named):
    """Has a loss of the samples that the batch says."""

    def parts_of(self, batch):
        return batch["x"][batch["chosen"]], batch["labels"][batch["chosen"]]


class Segments(ByClass):
    """Has 255 where there is no class."""

    PADDING = 255


class Reweighted(ByClass):
    """Has weights of classes from the second epoch on, where training is deferred to rare ones."""

    def loss(self, x, labels):
        weight = self.criterion.weight if self.current_epoch else None
        return cross_entropy(self.layers(x).mT, labels, weight, ignore_index=PADDING)


def samples(numbers_of_gaps, make):
    generator = torch.Generator().manual_seed(0)
    for gaps in numbers_of_gaps:
        labels = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
        mask, weights = torch.arange(LENGTH) < LENGTH - gaps, torch.tensor(1.0 + gaps)
        if issubclass(make, (Padded, ByClass)):
            labels = torch.where(mask, labels.clamp(min=PADDING + 1), getattr(make, "PADDING", PADDING))
        elif make is Detected:
            labels = mask.long()
        elif make is Missing:
            labels = labels.float().where(mask, torch.nan)
        elif make not in (Masked, Weighted, WeightedNarrowly, Chosen):
            labels[:gaps] = -1 if make is Unlabelled else -100
        x = torch.randn(LENGTH, 4, generator=generator)
        named = {"x": x, "labels": labels} | ({"mask": mask, "weights": weights} if issubclass(make, Masked) else {})
        named |= (
            {"others": labels.where(torch.rand(LENGTH, generator=generator) < 0.4, -100)} if make is TakingTurns else {}
        )
        named |= {"chosen": torch.tensor(not gaps)} if make is Chosen else {}
        named |= {"length": torch.tensor(LENGTH - gaps)} if make is Measured else {}
        beside = torch.where(torch.rand(LENGTH, generator=generator) < 0.5, labels, -100)
        if make is Boxed:
            found = torch.randn(LENGTH - gaps, CLASSES, generator=generator)
            yield x, {"boxes": found, "name": f"with {len(found)} boxes"}
            continue
        yield (labels, x, beside) if make is PaddedBeside else (labels, x) if issubclass(make, Shifted) else named


RAGGED = [0, 1, 4, 5, 6, 6, 2, 0, 3, 3, 1, 5, 0, 0, 2, 4, 4, 1, 0, 3]
LATER = [0] * BATCH * 8 + [0, 1] * 4 + [0] * BATCH + RAGGED * 3
"""Of two replicas one can tell before the other."""
CASES = {
    "named": (Named, RAGGED),
    "shifted": (Shifted, [min(gaps, 4) for gaps in RAGGED]),
    "by sample": (BySample, RAGGED),
    "by sample, alike at first": (BySample, [2] * BATCH + RAGGED),
    "of samples": (OfSamples, RAGGED),
    "of samples, split by the user": (OfSamples, RAGGED * 2),
    "named, split by the user": (Named, RAGGED * 2),
    "alike at first": (Named, [2] * BATCH + RAGGED),
    "none at first": (Named, [0] * BATCH + RAGGED),
    "gaps in the fourth": (Named, ([0] * BATCH * 3 + [0, 0, 0, 0, 0, 0, 5, 4]) * 2),
    "alternating": (Alternating, RAGGED * 2),
    "twice": (Twice, RAGGED),
    "taking turns": (TakingTurns, RAGGED * 2),
    "changing": (Changing, [*RAGGED, *RAGGED[:BATCH]]),
    "mild": (Mild, [0, 1, 0, 2, 1, 0, 1, 1, *RAGGED]),
    "padded": (Padded, [min(gaps, 4) for gaps in RAGGED]),
    "masked": (Masked, [min(gaps, 5) for gaps in RAGGED]),
    "masked, alike at first": (Masked, [2] * BATCH + RAGGED),
    "weighted": (Weighted, RAGGED),
    "weighted in bf16": (Weighted, RAGGED),
    "weighted, all of bf16": (Weighted, RAGGED),
    "named, all of bf16": (Named, RAGGED),
    "shifted, all of bf16": (Shifted, [min(gaps, 4) for gaps in RAGGED]),
    "padded, all of bf16": (Padded, [min(gaps, 4) for gaps in RAGGED]),
    "weighted narrowly, all of bf16": (WeightedNarrowly, RAGGED),
    "measured, all of bf16": (Measured, RAGGED),
    "by class, all of bf16": (ByClass, [min(gaps, 5) for gaps in RAGGED]),
    "twofold": (Twofold, [min(gaps, 5) for gaps in RAGGED]),
    "measured": (Measured, RAGGED),
    "measured, alike at first": (Measured, [2] * BATCH + RAGGED),
    "by class": (ByClass, [min(gaps, 5) for gaps in RAGGED]),
    "padded later": (Padded, [0] * BATCH * 2 + [min(gaps, 4) for gaps in RAGGED]),
    "padded later, beside others": (PaddedBeside, [0] * BATCH * 2 + [min(gaps, 4) for gaps in RAGGED]),
    "by class, padded later": (ByClass, [0] * BATCH * 2 + [min(gaps, 5) for gaps in RAGGED]),
    "masked later": (Masked, [0] * BATCH * 2 + [min(gaps, 5) for gaps in RAGGED]),
    "reweighted": (Reweighted, [min(gaps, 5) for gaps in RAGGED * 2]),
    "detected": (Detected, [0, 1, 6, 6, 3, 4, 2, 6, *RAGGED]),
    "detected, none later": (Detected, [min(gaps, 4) for gaps in RAGGED] + [0, 1, 6, 6, 3, 4, 2, 6] * 2 + [LENGTH] * 8),
    "detected, one in each at first": (Detected, [LENGTH - 1] * BATCH + [min(gaps, LENGTH - 1) for gaps in RAGGED]),
    "boxed": (Boxed, RAGGED),
    "boxed, alike at first": (Boxed, [2] * BATCH + RAGGED),
    "boxed, none later": (Boxed, [min(gaps, 4) for gaps in RAGGED] + [6, 6, 6, 6, 3, 4, 2, 6] * 2),
    "missing": (Missing, [min(gaps, 5) for gaps in RAGGED]),
    "missing later": (Missing, [0] * BATCH * 2 + [min(gaps, 5) for gaps in RAGGED]),
    "unlabelled later": (Unlabelled, [0] * BATCH * 2 + [min(gaps, 5) for gaps in RAGGED]),
    "chosen, half of each at first": (Chosen, [0, 1] * BATCH + [0, 0, 0, 1] * BATCH),
    "segments": (Segments, [min(gaps, 5) for gaps in RAGGED]),
    "replicas": (Named, RAGGED[:16]),
    "replicas, one has none, divided": (Named, [LENGTH, 0] * 4 + [1, 3] * 4),
    "replicas, twice": (Twice, [LENGTH, 0, LENGTH, 1, 0, 2, 1, 0]),
    "replicas, twice, divided": (Twice, [LENGTH, 0, LENGTH, 1, 0, 2, 1, 0]),
    "replicas, later": (Named, LATER),
    "replicas, in the fourth": (Named, [0] * BATCH * 7 + [0] * 4 + [0, 5, 0, 4] + RAGGED),
    "replicas, alternating": (Alternating, RAGGED * 4),
    "replicas, divided": (Named, LATER),
}


def in_turns(batch, num_microbatches):
    """Microbatches whose samples are not beside each other, as in the batch."""
    number = min(num_microbatches, len(batch["x"]))
    return [{name: values[first::number] for name, values in batch.items()} for first in range(number)]


def trained(name, rank, num_ranks):
    """What comes of a training, on one device or on ranks."""
    make, gaps = CASES[name]
    L.seed_everything(0)
    module = make()
    replicas = 2 if name.startswith("replicas") else 1
    data = list(samples(gaps, make))
    # in order, where Lightning's shuffles
    in_order = DistributedSampler(data, replicas, rank * replicas // num_ranks, shuffle=False)
    collate = {Boxed: as_lists, BySample: list}.get(make)
    loader = DataLoader(data, batch_size=BATCH, sampler=in_order, collate_fn=collate)
    devices = {"devices": 1}
    if num_ranks > 1:
        divided = {"fully_shard": "zero3"} if name.endswith("divided") else {}
        said_of_them = {"microbatch_weight": "tokens"} if name.startswith("replicas, twice") else {}
        said_of_them |= {"split_batch": in_turns} if name.endswith("split by the user") else {}
        number = 4 if name.endswith("in the fourth") else 4 // replicas
        strategy = PfoPipelineStrategy(num_microbatches=number, data_parallel_size=replicas, **divided, **said_of_them)
        devices = {"devices": num_ranks, "strategy": strategy}
    precision = "bf16-mixed" if name in ("mild", "weighted in bf16") else "32-true"
    precision = "bf16-true" if name.endswith("all of bf16") else precision
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, precision=precision, use_distributed_sampler=False, **devices, **QUIET
    )
    said.clear()
    trainer.fit(module, loader, loader)
    values = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"losses": module.losses, "values": values, "said": list(said)}


class Note(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())


def main(folder, num_ranks):
    logging.getLogger("lightning_pfo").addHandler(Note())
    logging.getLogger("lightning_pfo").setLevel(logging.INFO)
    rank = torch.distributed.get_rank() if num_ranks > 1 else 0
    names = [name for name in CASES if name.startswith("replicas") == (num_ranks == 4)]
    if torch.__version__ < OLDEST_FSDP["cpu"]:
        names = [name for name in names if not name.endswith("divided")]
    found = {name: trained(name, rank, num_ranks) for name in names}
    (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    run_ranks(main, int(sys.argv[2]), sys.argv[1], int(sys.argv[2]))
