"""Recurrent layers on packed sequences, with a loss of the whole batch; usage: packed.py FOLDER."""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.errors import ConfigurationError
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
LENGTHS = 4 + torch.arange(24) % 5


class Padded(L.LightningModule):
    """Attends over what is padded again to the length of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn = nn.Embedding(20, 8), nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.keys, self.layers = nn.Linear(16, 8), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head, self.losses = nn.Linear(16, 20), []

    def encoded(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=self.length(words))
        scores = self.keys(found).square().sum(-1)
        mask = torch.arange(words.shape[1])[None] < lengths[:, None]
        return (scores.masked_fill(~mask, -1e9).softmax(-1)[..., None] * found).sum(1)

    def length(self, words):
        return words.shape[1]

    def training_step(self, batch, batch_idx):
        words, lengths, labels = batch
        x = self.encoded(words, lengths)
        for layer in self.layers:
            x = layer(x).relu()
        loss = nn.functional.cross_entropy(self.head(x), labels)
        self.log("perplexity", loss.exp())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append([float(outputs["loss"]), float(self.trainer.callback_metrics["perplexity"])])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class LastStates(Padded):
    """Goes on with the states that sequences end with."""

    def encoded(self, words, lengths):
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        return torch.cat([*self.rnn(packed)[1]], -1)


class Longest(Padded):
    """Pads to the longest sequence, and says something of each place."""

    def training_step(self, batch, batch_idx):
        words, lengths, _ = batch
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        for layer in self.layers:
            found = layer(found).relu()
        loss = self.head(found).logsumexp(-1).mean()
        self.log("perplexity", loss.exp())
        return loss


class Packed(Padded):
    """Its layers end with the packed steps of all sequences."""

    def training_step(self, batch, batch_idx):
        words, lengths, _ = batch
        packed = pack_padded_sequence(self.embed(words), lengths, batch_first=True, enforce_sorted=False)
        loss = self.head(self.rnn(packed)[0].data).square().mean()
        self.log("perplexity", loss.exp())
        return loss


def run(number):
    generator = torch.Generator().manual_seed(1)
    words, labels = (torch.randint(1, 20, shape, generator=generator) for shape in ((24, 9), (24,)))
    results = {}
    for kind in (Padded, LastStates, *((Longest, Packed) if number > 1 else ())):
        module = kind()
        strategy = PfoPipelineStrategy(num_microbatches=4, schedule="gpipe", loss_over="batch")
        trainer = L.Trainer(
            accelerator="cpu",
            devices=number,
            strategy=strategy if number > 1 else "auto",
            max_epochs=1,
            **QUIET,
        )
        try:
            trainer.fit(module, DataLoader(TensorDataset(words, LENGTHS, labels), batch_size=8))
        except ConfigurationError as error:
            results[kind.__name__] = str(error)
            continue
        results[kind.__name__] = module.losses
    rank = dist.get_rank() if dist.is_initialized() else 0
    (FOLDER / f"{number}_{rank}.json").write_text(json.dumps(results))


for number in (1, 2):
    run_ranks(run, number, number)
