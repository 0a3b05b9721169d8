"""Many small runs in one launch of 3 processes; every rank writes what it saw to OUTPUT/rank_N.json."""

import json
import logging
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.plugins.precision import Precision
from plain_module import PlainModule, make_loaders
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.ranks import run_ranks

DEVICES = 3
results = {}


def fit(module, loader=None, max_steps=2, strategy=None, validate=False, seed=3, seed_workers=False, **options):
    L.seed_everything(seed, workers=seed_workers)
    train, val = make_loaders(num_samples=48, batch_size=12)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=DEVICES,
        strategy=strategy or PfoPipelineStrategy(num_microbatches=4),
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader or train, val if validate else None)
    return trainer


class Recorder(L.Callback, InstructionListener):
    """Writes down what happens, in order."""

    def __init__(self):
        self.seen = []

    def on_train_start(self, trainer, pl_module):
        self.example = pl_module.example_input_array
        self.source = trainer.strategy.instruction_source
        self.source.add_listener(self)

    def on_iteration_begin(self, iteration):
        self.seen.append(f"iteration {iteration}")

    def on_instruction_begin(self, event):
        self.seen.append(f"begin {event.instruction} {event.iteration}")

    def on_instruction_end(self, event):
        self.seen.append(f"end {event.instruction} {event.iteration}")

    def on_iteration_end(self, iteration):
        self.seen.append(f"iteration {iteration} over")


class Lines(logging.Handler):
    """Writes down what is logged, where nobody looks for what a step leaves."""

    def __init__(self, lines):
        super().__init__()
        self.lines = lines

    def emit(self, record):
        self.lines.append(record.getMessage())


class SaysWhenItComputesTheLoss(PlainModule):
    tell = None

    def loss(self, batch):
        result = super().loss(batch)
        if self.tell is not None:
            self.tell("loss")
        return result


def events():
    recorder = Recorder()
    module = SaysWhenItComputesTheLoss()
    logger = logging.getLogger("steps")
    logger.setLevel(logging.INFO)
    logger.addHandler(Lines(recorder.seen))
    module.tell = logger.info
    module.example_input_array = "what summaries and loggers call the module with"
    trainer = fit(module, callbacks=[recorder], validate=True)
    results["events"] = recorder.seen
    results["examples"] = [recorder.example, module.example_input_array]
    schedule = recorder.source.schedule
    results["schedule"] = [[str(inst) for inst in order] for order in schedule.orders]
    results["global_step"] = trainer.global_step


def short_batches():
    """Two epochs of 12, 12 and then few samples, for four microbatches."""
    for samples in (3, 7, 9):
        recorder = Recorder()
        trainer = fit(PlainModule(), loader(24 + samples, 12), max_steps=-1, max_epochs=2, callbacks=[recorder])
        heard = [line for line in recorder.seen if line.startswith(("iteration", "begin"))]
        results[f"short_{samples}"] = {"steps": trainer.global_step, "heard": heard}


class KeepsBatches(PlainModule):
    """Draws random numbers everywhere a user might."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        noise = torch.rand_like(x)
        self.noise_sums.append(float(noise.sum()))
        return super().training_step((x + 0.1 * noise, y), batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.batch_sums.append(float(batch[0].sum()))


def randomness():
    for run in ("first", "second"):
        L.seed_everything(3)
        module = KeepsBatches(dropout=0.3)
        module.noise_sums, module.batch_sums = [], []
        fit(module, max_steps=-1, max_epochs=3)
        results[f"randomness_{run}"] = {
            "batches": module.batch_sums,
            "noise": module.noise_sums,
            "losses": module.history["train"],
        }


class Augmented(TensorDataset):
    """Draws random numbers in the worker process of the DataLoader."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.rand_like(x), y


def workers():
    x = torch.ones(24, 6)
    module = KeepsBatches()
    module.noise_sums, module.batch_sums = [], []
    fit(module, DataLoader(Augmented(x, x[:, 0].long()), batch_size=12, num_workers=1), seed_workers=True)
    results["augmented"] = module.batch_sums


class BatchNormModule(PlainModule):
    def __init__(self):
        super().__init__(num_layers=3)
        self.model = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Unflatten(1, (4, 2)), nn.Flatten(), nn.Linear(8, 16), nn.ReLU()
        )


def batch_norm():
    for how in ("microbatch", "deferred"):
        module = BatchNormModule()
        fit(module, max_steps=3, strategy=PfoPipelineStrategy(num_microbatches=4, batch_norm=how))
        norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm1d) and not m.weight.is_meta]
        results[f"batches_tracked_{how}"] = [int(norm.num_batches_tracked) for norm in norms]


class TupleModule(PlainModule):
    """Passes a pair between layers, and takes keyword arguments."""

    class Split(nn.Module):
        def forward(self, x):
            return x, x.detach().argmax(1)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, pair):
            return self.linear(pair[0]).tanh(), pair[1]

    class Join(nn.Module):
        def forward(self, pair):
            return {"logits": pair[0] + pair[1][:, None] * 0.1}

    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(self.Split(), self.Pair(), self.Pair(), self.Join())

    def loss(self, batch):
        x, y = batch
        self.logits = logits = self.head(self.model(self.stem(x))["logits"])
        return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


def compared(name, make, strategy=None):
    """Three losses of a module, and the last accuracy, on the pipeline and on one device."""
    L.seed_everything(3)
    module = make()
    trainer = fit(module, max_steps=3, strategy=strategy)
    results[f"{name}_losses"] = [*module.history["train"], float(trainer.callback_metrics["train_accuracy"])]
    L.seed_everything(3)
    single = make()
    L.seed_everything(3)  # as `fit` does, for the order of batches
    train, _ = make_loaders(num_samples=48, batch_size=12)
    optimizer, _ = single.configure_optimizers()
    logged = {}
    single.log = lambda *args, **kwargs: None
    single.log_dict = lambda values, **kwargs: logged.update(values)
    expected = []
    for batch in list(train)[:3]:
        loss = single.training_step(batch, 0)
        optimizer[0].zero_grad()
        loss.backward()
        optimizer[0].step()
        expected.append(float(loss))
    results[f"{name}_expected"] = [*expected, float(logged["train_accuracy"])]


class CallsTwice(PlainModule):
    """Calls a part three times, on different stages."""

    def loss(self, batch):
        with torch.no_grad():
            target = self.stem(batch[0])
        loss, accuracy = super().loss(batch)
        return loss + (self.stem(batch[0]) - target.tanh()).square().mean(), accuracy


class TwoTowers(PlainModule):
    """Two lists of layers, one after the other."""

    def __init__(self):
        super().__init__(num_layers=2)
        self.other = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.stem = nn.Sequential(self.stem, nn.Tanh())

    def loss(self, batch):
        x, y = batch
        logits = self.head(self.other(self.model(self.stem(x))))
        self.logits = logits.detach()
        return nn.functional.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()


class Contrastive(PlainModule):
    """Tells each sample from the others of its batch; what it logs is not a mean over samples either."""

    def loss(self, batch):
        x, _ = batch
        embedded = nn.functional.normalize(self.head(self.model(self.stem(x))), dim=1)
        self.logits = embedded.detach()
        return nn.functional.cross_entropy(5 * embedded @ embedded.T, torch.arange(len(x))), embedded.std(0).mean()


class FewLayers(PlainModule):
    def __init__(self):
        super().__init__(num_layers=2)
        self.stem, self.head = nn.Identity(), nn.Identity()
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 3))


class NeverCalls(PlainModule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def loss(self, batch):
        self.logits = batch[0] @ self.weight
        return self.logits.square().mean(), torch.tensor(0.0)


class ReturnsNothing(PlainModule):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return "nothing"


class FailsInTheLoss(PlainModule):
    def loss(self, batch):
        loss, accuracy = super().loss(batch)
        if self.trainer.global_step == 1:
            raise ZeroDivisionError("the user's own mistake")
        return loss, accuracy


class FailsInALayer(PlainModule):
    def __init__(self):
        super().__init__()
        self.model[3] = nn.Linear(5, 5)


class SearchesALine(PlainModule):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class OtherPrecision(Precision):
    precision = "transformer-engine"


class ShardsItself(PlainModule):
    def configure_model(self):
        fully_shard(self.model[0], mesh=self.device_mesh["data_parallel"])


class SendsDividedTensors(PlainModule):
    def configure_model(self):
        plan = {"0": ColwiseParallel(use_local_output=False)}
        parallelize_module(self.model[2], self.device_mesh["tensor_parallel"], plan)


class LogsAnObject(PlainModule):
    def training_step(self, batch, batch_idx):
        self.log("object", object())
        return super().training_step(batch, batch_idx)


def loader_of_rank():
    x = torch.full((12, 6), float(trainer_rank()))
    return DataLoader(TensorDataset(x, torch.zeros(12, dtype=torch.long)), batch_size=12)


def later_loader_of_rank():
    """The fifth batch alone is another one on each rank."""
    x = torch.ones(60, 6)
    x[48:] = float(trainer_rank())
    return DataLoader(TensorDataset(x, torch.zeros(60, dtype=torch.long)), batch_size=12)


def trainer_rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def loader(num_samples, batch_size, **options):
    data = TensorDataset(torch.randn(num_samples, 6), torch.zeros(num_samples, dtype=torch.long))
    return DataLoader(data, batch_size=batch_size, **options)


def refusals():
    used = PlainModule()
    fit(used)
    cases = {
        "never_calls": lambda: fit(NeverCalls()),
        "returns_nothing": lambda: fit(ReturnsNothing()),
        "fails_in_the_loss": lambda: fit(FailsInTheLoss()),
        "fails_in_a_layer": lambda: fit(FailsInALayer()),
        "logs_an_object": lambda: fit(LogsAnObject()),
        "few_layers": lambda: fit(FewLayers()),
        "other_batches": lambda: fit(PlainModule(), loader_of_rank()),
        "other_batches_later": lambda: fit(PlainModule(), later_loader_of_rank(), max_steps=5),
        "split_before": lambda: fit(used, strategy=PfoPipelineStrategy(partition="custom:0,1,3,4", num_microbatches=4)),
        "few_microbatches": lambda: fit(PlainModule(), strategy=PfoPipelineStrategy(num_microbatches=2)),
        "other_precision": lambda: fit(PlainModule(), plugins=[OtherPrecision()]),
        "divided_output": lambda: fit(SendsDividedTensors()),
        "sync_batchnorm": lambda: fit(BatchNormModule(), sync_batchnorm=True),
        "sharded_by_the_user": lambda: fit(ShardsItself()),
        "pruned": lambda: fit(PlainModule(), callbacks=[ModelPruning("l1_unstructured", amount=0.5)]),
        "lbfgs": lambda: fit(SearchesALine()),
        "compiled_zero_bubble": lambda: fit(
            PlainModule(), strategy=PfoPipelineStrategy(num_microbatches=6, schedule="zbv", compile=True)
        ),
    }
    results["errors"] = {}
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            results["errors"][name] = [type(error).__name__, str(error)]
        else:
            results["errors"][name] = ["nothing", ""]
    fit(PlainModule(), loader(30, 12), max_steps=-1, max_epochs=1)  # a last batch of 6 samples


def main(output):
    events()
    short_batches()
    randomness()
    workers()
    batch_norm()
    compared("tuple", TupleModule)
    compared("towers", TwoTowers)
    compared("stem_twice", CallsTwice)
    over_batch = PfoPipelineStrategy(num_microbatches=4, schedule="gpipe", loss_over="batch")
    compared("contrastive", Contrastive, over_batch)
    refusals()
    Path(output, f"rank_{trainer_rank()}.json").write_text(json.dumps(results))


run_ranks(main, DEVICES, sys.argv[1])
