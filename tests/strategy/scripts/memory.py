"""What two ranks are told of their memory, and what they take; writes OUTPUT/rank_N.json.

Measured is the memory of all tensors that live, wherever they come from, at every operator of an iteration.
"""

import gc
import json
import logging
import sys
import warnings
import weakref
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.loops import PipelinedModel
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.ranks import run_ranks
from tests.strategy.memory_cases import CASES, Images

FOLDER = Path(sys.argv[1])
STEP = 3  # batches are compared in the first three


class Living(TorchDispatchMode):
    """The memory of tensors that live, but those that lived before."""

    def __init__(self, before):
        super().__init__()
        self.before, self.alive, self.peak = before, {}, 0
        for tensor in all_tensors():
            self.note(tensor)

    def note(self, tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "cpu" and type(tensor).__name__ != "FakeTensor" and key not in self.before:
            self.alive.setdefault(key, weakref.ref(storage, lambda _: self.alive.pop(key, None)))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if type(leaf) in (torch.Tensor, nn.Parameter):
                self.note(leaf)
        storages = [storage() for storage in list(self.alive.values())]
        # sizes of now: FSDP2 gives memory back of tensors that stay
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages if storage is not None))
        return result


def all_tensors():
    gc.collect()
    return [
        one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter) and one.layout == torch.strided
    ]


class Measures(L.Callback):
    def __init__(self, before):
        self.before = before

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == STEP:
            self.living = Living(self.before)
            self.living.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == STEP:
            self.living.__exit__(None, None, None)


def run(kind, make, optimizer, options, trainer_options):
    before = {tensor.untyped_storage()._cdata: tensor for tensor in all_tensors()}
    if issubclass(kind, Images):
        data = TensorDataset(torch.randn(96, 3, 16, 16), torch.randint(10, (96,)))
    else:
        data = TensorDataset(torch.randint(256, (96, 32)))
    before |= {tensor.untyped_storage()._cdata: tensor for tensor in data.tensors}
    torch.manual_seed(0)
    measures = Measures(before)
    trainer = L.Trainer(
        strategy=PfoPipelineStrategy(**{"num_microbatches": 4, "check_loss": False, "memory_report": True, **options}),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        limit_train_batches=STEP + 1,
        callbacks=[measures],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer_options,
    )
    module = kind(make(), optimizer)
    loader = DataLoader(data, batch_size=96 // (STEP + 1) // options.get("data_parallel_size", 1))
    trainer.fit(module, loader, loader if "val_check_interval" in trainer_options else None)
    report = trainer.strategy.memory_report
    mine = report.ranks[dist.get_rank()]
    return {
        "expected": mine.peak_bytes,
        "measured": measures.living.peak,
        "is_exact": mine.is_exact,
        "parts": dict(mine.parts),
        "ranks": len(report.ranks),
        "text": str(report),
    }


def run_in_loop():
    """A loop of one's own."""
    before = {tensor.untyped_storage()._cdata: tensor for tensor in all_tensors()}
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)), nn.Linear(256, 4))
    batch = torch.randn(512, 256), torch.randint(4, (512,))
    model = PipelinedModel(net, nn.functional.cross_entropy, num_microbatches=4, example_batch=batch)
    optimizer = optim.AdamW(model.parameters())
    report = model.foretell_memory([optimizer], *batch)
    for step in range(STEP + 1):
        if step == STEP:
            living = Living(before)
            living.__enter__()
        model.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
    living.__exit__(None, None, None)
    mine = report.ranks[dist.get_rank()]
    return {"expected": mine.peak_bytes, "measured": living.peak, "is_exact": mine.is_exact, "text": str(report)}


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    can_divide = torch.__version__ >= OLDEST_FSDP["cpu"]
    cases = {name: case for name, case in CASES.items() if can_divide or "fully_shard" not in case[3]}
    results = {name: run(*cases[name]) for name in sys.argv[2:] or cases}
    results["loop"] = run_in_loop()
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
