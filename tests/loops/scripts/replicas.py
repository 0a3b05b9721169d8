"""Two replicas of a pipeline of two against DDP of two, the same Accelerate loop; usage: replicas.py FOLDER."""

import copy
import json
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from net import Net, make_loaders
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset

from lightning_pfo.accelerate import prepare_pipeline
from tests.ranks import run_ranks
from tests.saying import saying

FOLDER = Path(sys.argv[1])
loss_fn = nn.functional.cross_entropy


class Counted:
    """An object of the user's that is kept in checkpoints."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def make(name):
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = Net()
    net.layers[1][0].weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    train, val = make_loaders(batch_size=8)
    val = accelerator.prepare(val)  # before the pipeline
    if name == "pipeline":
        model, optimizer, train = prepare_pipeline(
            accelerator,
            net,
            optimizer,
            train,
            loss_fn,
            num_microbatches=4,
            pipeline_module="layers",
            data_parallel_size=2,
        )
    else:
        model, optimizer, train = accelerator.prepare(net, optimizer, train)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=21))
    accelerator.register_for_checkpointing(counted := Counted())
    return accelerator, model, optimizer, scheduler, train, val, counted


def go_on(made, folder):
    """Go on with what was saved, and say what is known after each step."""
    made[0].load_state(folder)
    return [made[-1].count, *steps(made)]


def steps(made):
    accelerator, model, optimizer, scheduler, _, val, _ = made
    seen = []
    model.train()
    for x, y in val:
        loss = model(x, y) if is_pipeline(model) else loss_fn(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += [loss.item(), scheduler.get_last_lr()[0]]
    return seen


def is_pipeline(model):
    return hasattr(model, "predict")


def resumed(name, source):
    (FOLDER / f"{name}_from_{source}_{dist.get_rank()}.json").write_text(json.dumps(go_on(make(name), FOLDER / source)))


def main(name):
    accelerator, model, optimizer, scheduler, train, val, counted = made = make(name)
    history = {"loss": [], "norm": [], "predicted": [], "repeated": [], "lr": []}
    for x, y in train:
        with accelerator.accumulate(model):
            loss = model(x, y) if is_pipeline(model) else loss_fn(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                history["norm"].append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        history["loss"].append(loss.item())
        history["lr"].append(scheduler.get_last_lr()[0])
        counted.count += 1
    accelerator.save_state(FOLDER / name)
    history["processes"] = accelerator.num_processes
    with accelerator.split_between_processes(list(range(5)), apply_padding=True) as part:
        history["part"] = part
    history["gathered"] = accelerator.gather({"loss": loss, "some": [x[:2], y]})
    history["reduced"] = {
        kind: accelerator.reduce((loss.detach(), x[:2]), kind) for kind in ("sum", "mean", "max", "none")
    }
    history = tree_map_only(torch.Tensor, torch.Tensor.tolist, history)
    model.eval()
    for x, _ in val:
        with torch.no_grad():
            logits = model.predict(x) if is_pipeline(model) else model(x)
        history["predicted"] += accelerator.gather_for_metrics(logits).flatten().tolist()
        history["repeated"] += accelerator.gather_for_metrics(logits.mean().repeat(8)).tolist()
    kept = copy.deepcopy([accelerator.get_state_dict(model), optimizer.state_dict()])
    model.train()
    with LocalSGD(accelerator, model, local_sgd_steps=2) as local:
        for x, y in train:
            loss = model(x, y) if is_pipeline(model) else loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            history["loss"].append(loss.item())
    weights = accelerator.get_state_dict(model)
    history["weights"] = {key: value.flatten().tolist() for key, value in weights.items()}
    history["resumed"] = go_on(made, FOLDER / name)
    (model if is_pipeline(model) else accelerator.unwrap_model(model)).load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])  # whole states that the first of four ranks alone has
    history["rolled back"] = steps(made)
    (FOLDER / f"{name}_{dist.get_rank()}.json").write_text(json.dumps(history))


class Recalling(nn.Module):
    """Computes with what the batch before has left in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        shifted = x + self.last
        self.last.copy_(x.detach().mean(0))
        return shifted


def buffers(name):
    """Buffers of a replica are its own while it accumulates, and then the first one's."""
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = nn.Sequential(Recalling(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    train, _ = make_loaders(batch_size=8)
    if name == "pipeline":
        options = {"num_microbatches": 1, "schedule": "gpipe", "data_parallel_size": 2}
        model, optimizer, train = prepare_pipeline(accelerator, net, optimizer, train, loss_fn, **options)
    else:
        model, optimizer, train = accelerator.prepare(net, optimizer, train)
    losses = []
    for x, y in train:
        with accelerator.accumulate(model):
            loss = model(x, y) if is_pipeline(model) else loss_fn(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    last = accelerator.get_state_dict(model).get("0.last")
    found = {"losses": losses, "last": None if last is None else last.tolist()}
    (FOLDER / f"buffers_{name}_{dist.get_rank()}.json").write_text(json.dumps(found))


def prepare(name):
    """Without accumulation by Accelerate."""
    set_seed(3)
    accelerator, net = Accelerator(cpu=True), Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    _, loader = make_loaders(batch_size=4)
    if name == "pipeline":
        options = {"num_microbatches": 4, "pipeline_module": "layers", "data_parallel_size": 2}
        return accelerator, *prepare_pipeline(accelerator, net, optimizer, loader, loss_fn, **options)
    return accelerator, *accelerator.prepare(net, optimizer, loader)


def loss_of(model, x, y):
    return model(x, y) if is_pipeline(model) else loss_fn(model(x), y)


def unsynced(name):
    """Every other batch is in the model's own `no_sync`."""
    accelerator, model, optimizer, loader = prepare(name)
    found = []
    for index, (x, y) in enumerate(loader):
        with nullcontext() if index % 2 else model.no_sync():
            loss = loss_of(model, x, y)
            accelerator.backward(loss)
        found.append(loss.item())
        if index % 2:
            found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
            optimizer.step()
            optimizer.zero_grad()
    return found


def uneven(name):
    """One replica comes to a further batch than the other, which has it later."""
    accelerator, model, optimizer, loader = prepare(name)
    batches, has_ended = list(loader), FOLDER / f"{name}_has_ended"
    is_first = dist.get_rank() < dist.get_world_size() // 2
    found = {"losses": [], "waits": []}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model]):
            for index, (x, y) in enumerate(batches[:4]):
                if index == 3 and not is_first:
                    time.sleep(0.5)  # the first one is in its step, if it is not slow
                    found["waits"].append(not has_ended.exists())
                loss = loss_of(model, x, y)
                accelerator.backward(loss)
                if index == 3 and is_first:
                    has_ended.touch()
                optimizer.step()
                optimizer.zero_grad()
                found["losses"].append(loss.item())
    found["said"] = [str(warning.message) for warning in said if "uneven" in str(warning.message)]
    return found


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(37.0))


def streamed(name):
    """Which samples metrics are made of, as streams are not dispatched, and what is said of that."""
    accelerator, *_ = prepare(name)
    accelerator.dataloader_config.dispatch_batches = False
    with saying() as texts:
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=8))
        gathered = [accelerator.gather_for_metrics(batch) for batch in loader]
    said = [text for text in texts if "Stream in turn" in text]
    return {"gathered": torch.cat(gathered).tolist(), "said": said}


def contexts(name):
    found = {"unsynced": unsynced(name), "uneven": uneven(name), "streamed": streamed(name)}
    (FOLDER / f"contexts_{name}_{dist.get_rank()}.json").write_text(json.dumps(found))


run_ranks(main, 2, "ddp")
run_ranks(contexts, 2, "ddp")
run_ranks(contexts, 4, "pipeline")
run_ranks(buffers, 2, "ddp")
run_ranks(buffers, 4, "pipeline")
run_ranks(main, 4, "pipeline")
run_ranks(resumed, 4, "pipeline", "ddp")
run_ranks(resumed, 2, "ddp", "pipeline")
