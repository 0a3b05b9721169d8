"""What is promised of gradients, noise, checkpoints, texts and whole modules; usage: kept_promises.py FOLDER.

The same runs by a plain Trainer and by the pipeline on one and two ranks, and by replicas of a pipeline and DDP; each
writes what it saw.
"""

import contextlib
import io
import json
import pickle
import sys
import threading
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pfo.core.errors import PfoError
from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from tests.quiet import QUIET
from tests.ranks import run_ranks
from tests.saying import saying

FOLDER = Path(sys.argv[1])
DATA = torch.randn(22, 4, generator=torch.Generator().manual_seed(1))
NUM_DEVICES = {"two": 2, "ddp": 2, "four": 4}
PATIENCE_S = 60
OF_TENSORS = ("broadcast", "send", "isend")
OF_OBJECTS = ("broadcast_object_list", "send_object_list", "gather_object", "all_gather_object")


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        self.seen = []

    def loss(self, batch):
        return self.layers(batch[0]).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(data=DATA, batch_size=4):
    return DataLoader(TensorDataset(data), batch_size=batch_size)


def trainer_of(place, callbacks=(), strategy=None, **options):
    """`strategy` has options of the pipeline."""
    pipeline = {"num_microbatches": 2, "data_parallel_size": 2 if place == "four" else 1} | (strategy or {})
    return L.Trainer(
        accelerator="cpu",
        devices=NUM_DEVICES.get(place, 1),
        strategy={"plain": "auto", "ddp": "ddp"}.get(place) or PfoPipelineStrategy(**pipeline),
        callbacks=list(callbacks),
        **{**QUIET, "max_epochs": 1, "num_sanity_val_steps": 0, **options},
    )


def rank_of():
    return dist.get_rank() if dist.is_initialized() else 0


class LooksAtGradients(Module):
    """In six hooks."""

    def look(self, hook):
        own = {name: p.grad for name, p in self.named_parameters() if not p.is_meta}
        self.seen.append([hook, {name: None if grad is None else grad.tolist() for name, grad in own.items()}])

    def on_train_batch_start(self, *_):
        self.look("on_train_batch_start")

    def on_before_backward(self, *_):
        self.look("on_before_backward")

    def on_after_backward(self):
        self.look("on_after_backward")

    def on_before_optimizer_step(self, *_):
        self.look("on_before_optimizer_step")

    def on_before_zero_grad(self, *_):
        self.look("on_before_zero_grad")

    def on_train_batch_end(self, *_):
        self.look("on_train_batch_end")


def gradients(place):
    trainer_of(place, accumulate_grad_batches=2).fit(module := LooksAtGradients(), loader())
    return module.seen


class Noisy(Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def validation_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        self.seen.append((rows + torch.randn_like(rows)).tolist())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.drop.train()  # several predictions of one sample
        return self.drop(self.layers(batch[0]) + 1)


def noise(place):
    """All batches are the same; a fit validates twice."""
    L.seed_everything(1, verbose=False)
    same, module = loader(torch.zeros(16, 4)), Noisy()
    trainer = trainer_of(place, max_epochs=2)
    trainer.fit(module, same, same)
    for _ in range(2):
        trainer.validate(module, same, verbose=False)
    trainer.test(module, same, verbose=False)
    wide = loader(torch.zeros(160, 4), batch_size=40)
    predictions = [prediction.tolist() for _ in range(2) for prediction in trainer.predict(module, wide)]
    return {"evaluated": module.seen, "predicted": predictions}


class NoisyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        rows = self.layers(x)
        return rows + torch.randn_like(rows)


def noise_in_a_loop(place):
    """Predictions and losses of one batch, in a loop of one's own."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = PipelinedModel(NoisyNet(), nn.functional.mse_loss, num_microbatches=2).eval()
    x = torch.ones(4, 4)
    with torch.no_grad():
        losses = [float(model(x, x)) for _ in range(3)]
    found = [losses, [model.predict(x).tolist() for _ in range(3)]]
    model.release()
    return found


class Stops(Module):
    """By the error that ends loops, in a hook of one rank or in the step."""

    def __init__(self, where, rank):
        super().__init__()
        self.where, self.of_rank = where, rank

    def stop(self, where, batch_idx):
        if (where, batch_idx) == (self.where, 1) and self.of_rank in (None, rank_of()):
            raise StopIteration

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.stop("step", batch_idx)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.stop("begin", batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())
        self.stop("end", batch_idx)


def stops(place):
    """By all ranks alike, and by one alone."""
    trainer_of(place).fit(module := Stops("step", None), loader())
    found = {"together": module.seen}
    for where, rank in (("begin", 1), ("end", 0)) if place == "two" else ():
        try:
            trainer_of(place).fit(Stops(where, rank), loader())
        except PfoError as error:
            found[f"{where} {rank}"] = [type(error).__name__, str(error)]
    return found


class Renames(Module):
    """Loads weights of a module that had this one as its part."""

    def load_state_dict(self, state_dict, *args, **kwargs):
        self.seen.append(sorted(state_dict))
        own = {name.removeprefix("part."): value for name, value in state_dict.items()}
        return super().load_state_dict(own, *args, **kwargs)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.loss(batch).item())

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.layers(batch[0])


def save_foreign_checkpoint():
    """Of other names, and without states of optimizers."""
    generator = torch.Generator().manual_seed(5)
    state = {
        f"part.{name}": torch.randn(value.shape, generator=generator) for name, value in Module().state_dict().items()
    }
    rest = {"callbacks": {}, "lr_schedulers": [], "optimizer_states": [], "epoch": 0, "global_step": 0}
    torch.save({"state_dict": state, "pytorch-lightning_version": L.__version__, **rest}, FOLDER / "foreign.ckpt")


def loads_foreign_checkpoints(place):
    found, path = [], FOLDER / "foreign.ckpt"
    for kind in ("fit", "validate", "test"):
        options = {} if kind == "fit" else {"verbose": False}
        getattr(trainer_of(place), kind)(module := Renames(), loader(), ckpt_path=path, **options)
        found.append(module.seen)
    predictions = trainer_of(place).predict(Renames(), loader(), ckpt_path=path)
    return [*found, torch.cat(predictions).tolist()]


class FetchesTwo(Module):
    def training_step(self, dataloader_iter):
        return sum(self.loss(next(dataloader_iter)[0]) for _ in range(2))


def fetches_two(place):
    try:
        trainer_of(place).fit(FetchesTwo(), loader())
    except PfoError as error:
        return [type(error).__name__, str(error)]
    return "has come to an end"


class Lists(L.Callback):
    """Notes which callbacks the Trainer has."""

    def __init__(self):
        self.seen = []

    def note(self, trainer, *_):
        self.seen.append([type(callback).__name__ for callback in trainer.callbacks])

    on_fit_start = on_train_start = on_validation_start = on_train_batch_end = on_train_end = on_fit_end = note

    def setup(self, trainer, pl_module, stage):
        self.note(trainer)

    def teardown(self, trainer, pl_module, stage):
        self.note(trainer)


def lists_callbacks(place):
    """With few callbacks and with many, and where the strategy has more to do."""
    found = []
    for options in ({}, {"enable_progress_bar": True, "enable_model_summary": True}):
        lists = Lists()
        callbacks = [ModelCheckpoint(FOLDER / f"{place}_listed", save_last=True), lists]
        trainer = trainer_of(
            place,
            callbacks,
            {"memory_report": True},
            enable_checkpointing=True,
            limit_train_batches=2,
            limit_val_batches=1,
            **options,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.fit(module := Renames(), loader(), loader())
            lists.note(trainer)
            trainer.validate(module, loader(), verbose=False)
        lists.note(trainer)
        found.append(lists.seen)
    return found


class PredictsMuch(Module):
    def predict_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        return {"rows": rows.repeat(1, 10_000), "texts": ["x"] * len(rows)}


@contextlib.contextmanager
def counted():
    """Count the bytes of tensors that a rank gives torch to send, and of objects that are pickled."""
    sent = {"tensors": 0, "objects": 0}
    plain, dumps = {name: getattr(dist, name) for name in (*OF_TENSORS, *OF_OBJECTS)}, pickle.dumps

    def pickling(*args, **kwargs):
        data = dumps(*args, **kwargs)
        sent["objects"] += len(data)
        return data

    def counting(name):
        def send(given, *args, **kwargs):
            if name in OF_TENSORS:
                sent["tensors"] += given.nbytes
            else:
                pickling(args[0] if name == "all_gather_object" else given)
            return plain[name](given, *args, **kwargs)

        return send

    pickle.dumps = pickling
    for name in plain:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        pickle.dumps = dumps
        for name, function in plain.items():
            setattr(dist, name, function)


def sends_predictions(place):
    found = {}
    for gather in ("all", "rank0", "none"):
        with counted() as sent:
            predictions = trainer_of(place, strategy={"gather": gather}).predict(PredictsMuch(), loader())
        found[gather] = {**sent, "bytes": [each and each["rows"].nbytes for each in predictions]}
    return found


class Prints(Module):
    """Before the model, between its layers and after it."""

    def training_step(self, batch, batch_idx):
        self.print(f"training {batch_idx}")
        rows = self.layers[0](batch[0])
        self.print("between", batch_idx, sep=": ")
        loss = self.layers[1:](rows).square().mean()
        self.print(f"trained {batch_idx}", end="!\n")
        return loss

    def validation_step(self, batch, batch_idx):
        self.print("validating", batch_idx)
        self.loss(batch)
        self.print("validated", batch_idx)

    def test_step(self, batch, batch_idx):
        self.loss(batch)
        self.print("tested", batch_idx)


def prints(place):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer = trainer_of(place)
        trainer.fit(module := Prints(), loader(), loader())
        trainer.test(module, loader(), verbose=False)
    words = ("training", "between", "trained", "validating", "validated", "tested")
    return [line for line in said.getvalue().splitlines() if line.startswith(words)]


class KeepsMuch(Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = [], []

    def validation_step(self, batch, batch_idx):
        rows = self.layers(batch[0])
        self.large.append(rows.repeat(1, 100_000))
        self.small.append(rows.mean())

    def on_validation_epoch_end(self):
        self.seen.append([len(self.large), torch.stack(self.small).tolist()])
        self.large.clear()
        self.small.clear()


def keeps_much(place):
    """Twice."""
    with saying() as said:
        trainer, module = trainer_of(place, limit_val_batches=3), KeepsMuch()
        for _ in range(2):
            trainer.validate(module, loader(), verbose=False)
    return {"seen": module.seen, "said": [text for text in said if "self.large" in text]}


class LogsRates(Module):
    """Asks for what `configure_optimizers` makes, calls its layers from the last to the first, and has an average."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.layers)
        self.average = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        self.log("before", self.trainer.optimizers[0].param_groups[0]["lr"])
        (x,) = batch
        for layer in reversed(self.layers):
            x = layer(x)
        self.log("rate", self.optimizers().param_groups[0]["lr"])
        self.log("scheduled", self.lr_schedulers().get_last_lr()[0])
        loss = x.square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def logs_rates(place):
    """Those that a first look at the step does not have yet, and which stage has which layers."""
    (trainer := trainer_of(place)).fit(module := LogsRates(), loader())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    is_here = [not layer[0].weight.is_meta for layer in module.layers]
    return {"seen": module.seen, "logged": logged, "here": is_here, "average": module.average[0].weight.is_meta}


class SavesBeside(Module):
    """Saves after its second step; a file is not written before the fourth one has ended."""

    def __init__(self, path):
        super().__init__()
        self.path, self.may_write, self.waiting = path, threading.Event(), []

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"].item())
        if batch_idx == 1 and self.path is not None:
            self.trainer.save_checkpoint(self.path)
        if batch_idx == 3:
            self.waiting.append(not self.path.exists() if self.path else None)
            self.may_write.set()


def saves_beside(place):
    """And goes on with what was saved; a writer that fails is heard of."""
    path, write = FOLDER / f"{place}_beside.ckpt", FileSystemWriter.write_data
    strategy = {"save_distributed_checkpoint": "async"}

    def write_later(self, *args):
        if not module.may_write.wait(PATIENCE_S):
            raise TimeoutError("no step has come to its end meanwhile")
        return write(self, *args)

    def fail(self, *args):
        raise OSError("no space left")

    module, errors = SavesBeside(path), []
    FileSystemWriter.write_data = write_later
    try:
        trainer_of(place, strategy=strategy).fit(module, loader())
        FileSystemWriter.write_data = fail
        try:
            trainer_of(place, strategy=strategy).fit(SavesBeside(FOLDER / f"{place}_fails.ckpt"), loader())
        except OSError as error:
            errors.append(str(error))
    finally:
        FileSystemWriter.write_data = write
    trainer_of(place).fit(again := SavesBeside(None), loader(), ckpt_path=path)
    return {"losses": module.seen, "waiting": module.waiting, "again": again.seen, "errors": errors}


IDS = torch.randint(32, (16, 6), generator=torch.Generator().manual_seed(0))


class Llama(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        self.model = LlamaForCausalLM(LlamaConfig(**config, **heads, tie_word_embeddings=True))
        self.in_hook = None

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self):
        whole = whole_of(self)
        self.in_hook = whole and sum(p.detach().double().sum().item() for p in whole.parameters())


def whole_of(module):
    strategy = module.trainer.strategy
    return strategy.gather_module() if hasattr(strategy, "gather_module") else module


def gathers(place):
    """A model that is trained, put together, saved, read again, exported and asked."""
    trainer_of(place).fit(module := Llama(), loader(IDS))
    whole, ids = whole_of(module), IDS[:2, :3]
    if whole is None:
        return [module.in_hook is None]
    whole.model.eval().save_pretrained(folder := FOLDER / f"{place}_saved")
    again = LlamaForCausalLM.from_pretrained(folder).eval()
    asked = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    models = (whole.model, again, pickle.loads(pickle.dumps(whole.model)))
    with torch.no_grad():
        exported = torch.export.export(whole.model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        logits = [exported.module()(input_ids=ids, use_cache=False).logits, *(model(ids).logits for model in models)]
    return {
        "hook": module.in_hook,
        "generated": [model.generate(ids, **asked).tolist() for model in models],
        "logits": [each.tolist() for each in logits],
        "tied": [model.lm_head.weight is model.model.embed_tokens.weight for model in models],
        "names": list(whole.state_dict()),
    }


PARTS = (
    *(gradients, noise, stops, loads_foreign_checkpoints, fetches_two, lists_callbacks, sends_predictions),
    *(prints, keeps_much, saves_beside, gathers, logs_rates),
)


def main(place):
    torch.set_num_threads(1)
    parts = {"ddp": (gradients,), "four": (gradients,)}.get(place, PARTS)
    if place in ("one", "two"):
        parts += (noise_in_a_loop,)
    results = {part.__name__: part(place) for part in parts}
    (FOLDER / f"{place}_{rank_of()}.json").write_text(json.dumps(results))


save_foreign_checkpoint()
for where in ("plain", "one", "two", "ddp", "four"):
    run_ranks(main, NUM_DEVICES.get(where, 1), where)
