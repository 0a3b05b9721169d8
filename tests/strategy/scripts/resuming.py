"""Saves and resumes in many ways, each run in processes forked from this one; usage: resuming.py FOLDER.

Writes FOLDER/results.json.
"""

import inspect
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from plain_module import PlainModule, make_loaders
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_pfo.core.files import temporary_sibling
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from lightning_pfo.strategy.state import sharded as sharded_checkpoint
from lightning_pfo.strategy.trainer.checkpointing import SafeCheckpointIO

FOLDER = Path(sys.argv[1])
results = {}


save_shards = sharded_checkpoint.save


def noting_save(checkpoint, path, beside=None):
    if beside is not None:
        (FOLDER / f"beside_{path.name}_{dist.get_rank()}").write_text(dist.get_backend(beside))
    return save_shards(checkpoint, path, beside)


sharded_checkpoint.save = noting_save


class Module(PlainModule):
    """Reports to a file, because it is trained in processes of its own."""

    def __init__(self, report, dropout=0.0, extra=None):
        super().__init__(dropout=dropout)
        self.report = report
        if extra is not None:
            self.save_hyperparameters({"extra": extra})

    def on_fit_end(self):
        if self.trainer.is_global_zero:
            self.report.write_text(json.dumps(self.history))


def fit(devices, epochs=2, save=None, ckpt_path=None, shuffle=False, seed=3, module=None, **options):
    """Train; returns losses and learning rates of each step, and the module with its trained weights."""
    L.seed_everything(seed, verbose=False)
    module = module or Module(FOLDER / "history.json", options.pop("dropout", 0.0))
    train, val = make_loaders(num_samples=48, batch_size=12)
    if not shuffle:
        train = DataLoader(train.dataset, batch_size=12)
    sharded, top_k = options.pop("sharded", False), options.pop("save_top_k", -1)
    mesh = options.pop("mesh", {})
    how_to_load = {"weights_only": options.pop("weights_only")} if "weights_only" in options else {}
    strategy = {}
    if devices > 1:
        strategy["strategy"] = PfoPipelineStrategy(
            check_loss=False, num_microbatches=devices, start_method="fork", save_distributed_checkpoint=sharded, **mesh
        )
    callbacks = []
    if save is not None:
        dirpath = FOLDER / save
        callbacks = [ModelCheckpoint(dirpath, filename="{epoch}", monitor="val_loss", save_top_k=top_k, save_last=True)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        num_sanity_val_steps=0,
        limit_val_batches=1,
        accumulate_grad_batches=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **strategy,
    )
    trainer.fit(module, train, val, ckpt_path=ckpt_path, **how_to_load)
    history = json.loads(module.report.read_text())
    return [history["train"], history["lr"]], module


def names(folder):
    return sorted(path.name for path in (FOLDER / folder).iterdir())


def weights(path):
    return {key: value.flatten().tolist() for key, value in torch.load(path)["state_dict"].items()}


def any_number_of_stages():
    results["uninterrupted"], _ = fit(1, save="one")
    results["stages"] = {}
    for name, options in (("file", {}), ("folder", {"sharded": True})):
        results["stages"][f"{name}, uninterrupted"], trained = fit(3, save=name, **options)
        last = {"folder": "last-consolidated"}.get(name, "last")
        if name == "folder":
            for which in ("last", "epoch=0"):
                consolidate(FOLDER / f"folder/{which}.ckpt", FOLDER / f"folder/{which}-consolidated.ckpt")
        results[f"weights_{name}"] = weights(FOLDER / name / f"{last}.ckpt")
        results[f"returned_{name}"] = {k: v.flatten().tolist() for k, v in trained.state_dict().items()}
        results["stages"][f"{name}, 3 to 2"], _ = fit(2, ckpt_path=FOLDER / name / "epoch=0.ckpt")
    results["weights"] = weights(FOLDER / "one/last.ckpt")
    consolidated = FOLDER / "folder/epoch=0-consolidated.ckpt"
    results["stages"] |= {
        "file, 3 to 1": fit(1, ckpt_path=FOLDER / "file/epoch=0.ckpt")[0],
        "file, 1 to 3": fit(3, ckpt_path=FOLDER / "one/epoch=0.ckpt")[0],
        "consolidated, 3 to 1": fit(1, ckpt_path=consolidated)[0],
    }


def consolidate(folder, output):
    argv, sys.argv = sys.argv, ["consolidate_checkpoint", str(folder), "--output_file", str(output)]
    try:
        runpy.run_module("lightning.pytorch.utilities.consolidate_checkpoint", run_name="__main__")
    finally:
        sys.argv = argv


class Divided(Module):
    """Each linear layer of the pipelined module is computed by several processes."""

    def configure_model(self):
        for layer in self.model:
            parallelize_module(
                layer[0], self.device_mesh["tensor_parallel"], ColwiseParallel(output_layouts=Replicate())
            )


def divided_tensors():
    L.seed_everything(3, verbose=False)
    module = Divided(FOLDER / "divided.json")
    fit(4, epochs=1, save="tensor_parallel", mesh={"tensor_parallel_size": 2}, module=module)
    whole = fit(2, ckpt_path=FOLDER / "tensor_parallel/epoch=0.ckpt")[0]
    replicas = {"data_parallel_size": 2}
    divided = replicas | {"fully_shard": torch.__version__ >= OLDEST_FSDP["cpu"]}
    uninterrupted, _ = fit(4, save="fsdp", mesh=divided, sharded=True)
    resumed, _ = fit(4, ckpt_path=FOLDER / "fsdp/epoch=0.ckpt", mesh=replicas)
    results["divided"] = {"file": [whole, results["uninterrupted"]], "folder": [resumed, uninterrupted]}


def randomness():
    options = {"shuffle": True, "dropout": 0.3}
    results["random"], _ = fit(2, save="random", **options)
    results["random_resumed"], _ = fit(2, ckpt_path=FOLDER / "random/epoch=0.ckpt", seed=11, **options)


def top_k_and_last():
    for sharded in (False, True, "async"):
        folder = f"best_{sharded}"
        fit(2, epochs=1, save=folder, save_top_k=1, sharded=sharded)
        results[f"files_{folder}"] = [names(folder)]
        results[f"last_{folder}"], _ = fit(2, save=folder, ckpt_path="last", save_top_k=1, sharded=sharded)
        results[f"files_{folder}"].append(names(folder))
    results["beside"] = [name.read_text() for name in sorted(FOLDER.glob("beside_*"))]


def weights_only():
    results["weights_only"] = {}
    may_choose = "weights_only" in inspect.signature(L.Trainer.fit).parameters  # new in Lightning 2.6
    for sharded in (False, True):
        extra = OmegaConf.create({"a": 1})
        fit(2, epochs=1, save=f"unsafe_{sharded}", module=Module(FOLDER / "h.json", extra=extra), sharded=sharded)
        for choice in (None, True, False) if may_choose else (None,):
            how_to_load = {"weights_only": choice} if may_choose else {}
            try:
                fit(2, epochs=1, ckpt_path=FOLDER / f"unsafe_{sharded}/last.ckpt", **how_to_load)
                outcome = "loaded"
            except Exception as error:
                outcome = str(error)
            results["weights_only"][f"{sharded} {choice}"] = outcome


def save_until_killed(path, save):
    """Save version after version, and kill this process at the n-th save, while it writes."""
    state = {f"layer{i}": torch.zeros(1 << 20) for i in range(8)}
    for version in range(100):
        save({"state_dict": {key: value.fill_(version) for key, value in state.items()}, "version": version}, path)


def kill_while_saving(path, save):
    """Returns for each kill the version that is found, and whether all of it is there."""
    found = []
    for _ in range(3):
        seen = {path.name, temporary_sibling(path).name}
        process = os.fork()
        if process == 0:
            try:
                save_until_killed(path, save)
            finally:
                os._exit(1)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if path.exists() and temporary_sibling(path).exists() and len(found) <= version_of(path):
                break
            time.sleep(0.0005)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        assert {entry.name for entry in path.parent.iterdir()} <= seen
        found.append(check(path))
    return found


def version_of(path):
    try:
        return int(torch.load(path / "meta.pt" if path.is_dir() else path, mmap=path.is_file())["version"])
    except (OSError, RuntimeError):  # replaced meanwhile
        return -1


def check(path):
    if path.is_dir():
        module = torch.nn.Module()
        for index in range(8):
            module.register_buffer(f"layer{index}", torch.empty(1 << 20))
        loaded = sharded_checkpoint.load(path, module, [], weights_only=True)
    else:
        loaded = SafeCheckpointIO().load_checkpoint(path)
    version = loaded["version"]
    return [version, all(torch.equal(t, torch.full_like(t, version)) for t in loaded["state_dict"].values())]


def save_folder(checkpoint, path):
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded_checkpoint.save(checkpoint, path)


def interrupted_saves():
    (FOLDER / "killed_file").mkdir()
    (FOLDER / "killed_folder").mkdir()
    results["killed"] = {
        "file": kill_while_saving(FOLDER / "killed_file/last.ckpt", SafeCheckpointIO().save_checkpoint),
        "folder": kill_while_saving(FOLDER / "killed_folder/last.ckpt", save_folder),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for part in (any_number_of_stages, divided_tensors, randomness, top_k_and_last, weights_only, interrupted_saves):
        begin = time.process_time()
        part()
        print(part.__name__, time.process_time() - begin)
    (FOLDER / "results.json").write_text(json.dumps(results))
