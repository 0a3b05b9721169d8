"""Three ranks, of which all load batches, or the first for all; writes OUTPUT/rank_N.json."""

import json
import logging
import random
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
WIDTH = 6


class Augmented(Dataset):
    """Draws from the global generators, as transforms do."""

    def __init__(self, size, fails_at=None):
        self.size, self.calls, self.fails_at = size, 0, fails_at
        self.x = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("an image is broken")
        return self.x[index] + torch.rand(()) + random.random(), self.x[index].sum()


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from (self.data[index] for index in range(len(self.data)))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.Linear(WIDTH, 1))
        self.seen, self.batches, self.draws = [], [], []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.model(x).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validation", nn.functional.mse_loss(self.model(batch[0]).squeeze(-1), batch[1]))

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append([batch_idx, len(batch[0]), batch[0].double().sum().item()])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())
        self.draws.append(random.random() + torch.rand(()).item())

    def on_validation_epoch_end(self):
        self.seen.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_of(load_batches, *, num_microbatches=3, **options):
    return L.Trainer(
        strategy=PfoPipelineStrategy(num_microbatches=num_microbatches, check_loss=False, load_batches=load_batches),
        accelerator="cpu",
        devices=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 2, **options},
    )


def run(load_batches, make, *, num_workers=0, resume=False):
    """17 samples in batches of 6 have a short last batch."""
    L.seed_everything(5, workers=True, verbose=False)
    data, validation, module = Augmented(17), Augmented(7), Module()

    def loader():
        return DataLoader(make(data), 6, shuffle=make is not Stream, num_workers=num_workers)

    trainer = trainer_of(load_batches, max_steps=4 if resume else -1)
    trainer.fit(module, loader(), DataLoader(validation, 4))
    if resume:  # in the second epoch
        path = FOLDER / f"{load_batches}.ckpt"
        trainer.save_checkpoint(path)
        L.seed_everything(6, workers=True, verbose=False)
        seen, module = module.seen, Module()
        trainer_of(load_batches, max_epochs=4).fit(module, loader(), DataLoader(validation, 4), ckpt_path=path)
        module.seen = seen + module.seen
    calls = data.calls + validation.calls
    return {"seen": module.seen, "batches": module.batches, "draws": module.draws, "calls": calls}


def same(data):
    return data


def fail():
    data = Augmented(24, fails_at=14)
    try:
        trainer_of("first").fit(Module(), DataLoader(data, 6))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch_and_epoch")
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append([batch_indices, prediction.flatten().tolist()])

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append([batch_indices, [one.flatten().tolist() for one in predictions]])


def predict(load_batches, num_workers=0, make=lambda data: data):
    """Twice, with one loader: 8 samples in batches of 3, in an order of the sampler's."""
    L.seed_everything(5, workers=True, verbose=False)
    data, module, writer = Augmented(8), Module(), Writer()
    module.predict_step = lambda batch, batch_idx: module.model(batch[0])
    trainer = trainer_of(load_batches, callbacks=[writer])
    trainer.strategy._gather = "none" if num_workers else "all"  # the last rank writes, or the first
    options = {"num_workers": 1, "persistent_workers": True} if num_workers else {}
    samples = make(data)
    order = None if make is Stream else [5, 2, 7, 0, 1, 6, 3, 4]
    loader = DataLoader(samples, 3, sampler=order, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer.predict(module, loader)
            indices = [list(trainer.predict_loop.current_batch_indices)]
    unknown = sum("Couldn't infer the batch indices" in str(one.message) for one in caught)
    return {"calls": data.calls, "written": writer.written, "indices": indices, "unknown": unknown}


def collated(make, load_batches):
    """The items of the dataset are batches, of which the loader is told to take one."""
    x = Augmented(24).x
    batches = [(part, part.sum(1)) for part in x.split(6)]
    seen = []
    for number in (None, 6):
        torch.manual_seed(0)
        module = Module()
        trainer = trainer_of(load_batches, num_microbatches=number, max_epochs=1)
        trainer.fit(module, DataLoader(make(batches), batch_size=1, collate_fn=lambda items: items[0]))
        seen.append([trainer.strategy.instruction_source.schedule.num_microbatches, *module.seen])
    return seen


CASES = {
    "shuffled, augmented": {"make": same},
    "stream": {"make": Stream},
    "workers": {"make": same, "num_workers": 1},
    "resumed": {"make": same, "resume": True},
}
PREDICTED = {"in order": {}, "workers": {"num_workers": 1}, "stream": {"make": Stream}}


def main():
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    found = {name: {by: run(by, **options) for by in ("all", "first")} for name, options in CASES.items()}
    found["collated"] = [collated(make, by) for make in (same, Stream) for by in ("all", "first")]
    found["predict"] = {
        name: {by: predict(by, **options) for by in ("all", "first")} for name, options in PREDICTED.items()
    }
    found["error"] = fail()
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 3)
