"""Training on batches of all kinds, each of other shapes than the one before; usage: kinds_of_batches.py FOLDER.

By a plain Trainer on one process (plain_0), and by pfo_pipeline on two (two_0, two_1); each writes FOLDER/NAME.json.
"""

import json
import sys
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pandas
import torch
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader
from transformers import BatchFeature

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks
from tests.saying import saying
from tests.strategy.objects import Own, Slots

FOLDER = Path(sys.argv[1])
WIDTH = 8
LENGTHS = [(3, 3, 3, 3), (5, 5, 5, 5), (3, 3, 3, 3), (2, 2, 2, 2)]
"""How long the samples of each batch are."""
FEWER = [(3, 3, 3, 3), (3, 3)]
"""The last batch has as many samples as a size beside them has numbers."""
VARYING = [(4, 1, 2, 2), (1, 4, 2, 2), (3, 2, 3, 1), (4, 1, 2, 2)]


class Graphs:
    """The interface of torch_geometric.data.Batch."""

    def __init__(self, graphs):
        self.graphs, self.num_graphs = graphs, len(graphs)

    def to(self, *args, **kwargs):
        return self

    def to_dict(self):
        return {"x": torch.cat(self.graphs)}

    def to_data_list(self):
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs):
        return cls(graphs)


def padded(rows):
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def image_of(row):
    return Image.fromarray((row.numpy() * 20 + 128).clip(0, 255).astype(np.uint8))


def of_images(images):
    return torch.stack([torch.from_numpy(np.array(image)).float() / 100 for image in images])


def tables(rows):
    return [pandas.DataFrame(row.numpy()) for row in rows]


KINDS = {
    "size beside": (
        lambda rows: {"x": torch.stack(rows), "size": (4.0, 3.0)},
        lambda found: found["x"] / found["size"][1],
    ),
    "object in object": (lambda rows: Own(inner=Own(x=padded(rows))), lambda found: found.inner.x),
    "dict in object": (lambda rows: Own(store=[{"x": padded(rows)}]), lambda found: found.store[0]["x"]),
    "slots": (lambda rows: Own(inner=Slots(padded(rows))), lambda found: found.inner.x),
    "arrays": (lambda rows: Own(inner=Own(x=padded(rows).numpy())), lambda found: torch.as_tensor(found.inner.x)),
    "packed": (
        lambda rows: pack_sequence(rows, enforce_sorted=False),
        lambda found: torch.cat(unpack_sequence(found)),
    ),
    "packed, in object": (
        lambda rows: Own(x=pack_sequence(rows, enforce_sorted=False)),
        lambda found: torch.cat(unpack_sequence(found.x)),
    ),
    "nested": (lambda rows: torch.nested.nested_tensor(rows), lambda found: torch.cat(found.unbind())),
    "jagged": (
        lambda rows: torch.nested.nested_tensor(rows, layout=torch.jagged),
        lambda found: torch.cat(found.unbind()),
    ),
    "graphs": (Graphs, lambda found: torch.cat(found.to_data_list())),
    "images": (lambda rows: list(map(image_of, rows)), of_images),
    "tables": (tables, lambda found: torch.cat([torch.from_numpy(each.to_numpy()) for each in found])),
    "sparse": (lambda rows: padded(rows).relu().to_sparse(), lambda found: found.to_dense()),
    "flat": (lambda rows: {"x": torch.cat(rows), "lengths": [len(row) for row in rows]}, lambda found: found["x"]),
    "collated": (lambda rows: {"x": padded(rows)}, lambda found: found["x"]),
    "feature": (lambda rows: BatchFeature({"x": padded(rows), "mask": None}), lambda found: found["x"]),
}
VARY = ("packed", "packed, in object", "nested", "jagged", "graphs", "tables")
"""Kinds whose samples may have other lengths than one another."""
WHOLE = ("flat",)
"""Of which nobody could tell the number of samples: they are not divided."""
LOADED_BY_FIRST = ("feature", "packed, in object", "arrays")


class Model(L.LightningModule):
    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.read, self.losses = read, []

    def training_step(self, batch, batch_idx):
        y, found = batch
        return (self.net(self.read(found)) - 0.5).square().sum() / (10 * len(y))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(kind):
    noise = torch.Generator().manual_seed(1)
    for lengths in FEWER if kind == "size beside" else VARYING + LENGTHS if kind in VARY else LENGTHS:
        rows = [torch.randn(length, WIDTH, generator=noise) for length in lengths]
        yield torch.zeros(len(rows)), KINDS[kind][0](rows)


def losses(kind, where, load_batches="all"):
    how = {"num_microbatches": 1, "schedule": "gpipe"} if kind in WHOLE else {"num_microbatches": 2}
    pipeline = PfoPipelineStrategy(**how, load_batches=load_batches)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1 if where == "plain" else 2,
        strategy="auto" if where == "plain" else pipeline,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=1,
    )
    module = Model(KINDS[kind][1])
    items, loader = list(batches(kind)), {"batch_size": None, "collate_fn": lambda batch: batch}
    if kind == "collated":  # of one item, as the loader knows, whose samples are many
        loader = {"batch_size": 1, "collate_fn": lambda items: items[0]}
    trainer.fit(module, DataLoader(items, **loader))
    return module.losses, trainer.global_rank


def run(where):
    warnings.filterwarnings("ignore")
    found = {}
    with saying() as texts:
        for kind in KINDS:
            found[kind], rank = losses(kind, where)
        for kind in LOADED_BY_FIRST:
            found[f"{kind}, loaded by the first"], _ = losses(kind, where, "first")
    found["ended early"] = [text for text in texts if "Before training a first batch is looked at" in text]
    (FOLDER / f"{where}_{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for where, number in {"plain": 1, "two": 2}.items():
        run_ranks(run, number, where)
