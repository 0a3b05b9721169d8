"""Data, tensor and pipeline parallelism at once in 8 and 4 processes, compared with one device; usage: ... FOLDER.

Every rank writes what it saw to FOLDER/RUN_RANK.json; rank 0 then trains on one device with the same batches.
"""

import json
import sys
import weakref
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel import api as parallel_api
from torch.utils.data import DataLoader, TensorDataset

from lightning_pfo.core.events import InstructionListener
from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from lightning_pfo.strategy.parallel import fsdp
from lightning_pfo.strategy.state import full
from tests.ranks import run_ranks

NUM_EPOCHS = 2
CAN_SHARD = torch.__version__ >= OLDEST_FSDP["cpu"]
ORDER = "dp_pp_tp" if hasattr(parallel_api, "_validate_tp_mesh_dim") else "dp_tp_pp"
"""Older torch refuses a mesh in which tensor parallelism is not innermost, by this function; seen in 2.6 to 2.8."""
RUNS = {
    "tensor": {"tensor_parallel_size": 2, "data_parallel_size": 2},
    "sharded": {"tensor_parallel_size": 2, "data_parallel_size": 2, "fully_shard": CAN_SHARD, "mesh_order": ORDER},
    "sharded_zero_bubble": {"data_parallel_size": 2, "fully_shard": CAN_SHARD, "schedule": "interleaved_zero_bubble"},
}
ZERO = ("zero1", "zero2", "zero3")


class Block(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class Module(L.LightningModule):
    """As ModelParallelStrategy's documentation has it: layers are made and divided in `configure_model`."""

    def __init__(self, divided):
        super().__init__()
        self.divided = divided
        self.stem = nn.Linear(6, 8)
        self.model = None
        self.seen = {"loss": [], "batches": [], "val": []}
        self.wholes = []

    def configure_model(self):
        if self.model is not None:
            return
        self.model = nn.Sequential(*(Block() for _ in range(5)), nn.Linear(8, 3))
        if self.divided:
            for block in self.model[:-1]:
                parallelize_module(
                    block, self.device_mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(self.stem(x)), y)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val", nn.functional.cross_entropy(self.model(self.stem(x)), y))

    def configure_optimizers(self):
        groups = [
            {"params": [p for n, p in self.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for n, p in self.named_parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.02)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen["loss"].append(float(outputs["loss"]))
        self.seen["batches"].append([part.tolist() for part in batch])

    def on_train_end(self):
        if isinstance(self.trainer.strategy, PfoPipelineStrategy):
            with counted(full) as counts:
                self.wholes.append(self.trainer.strategy.gather_module())
            self.others_at_once = max(counts)

    def on_validation_epoch_end(self):
        self.seen["val"].append(float(self.trainer.callback_metrics["val"]))


@contextmanager
def counted(full):
    """Count the tensors put together of parts that are still there when the next one is."""
    found, counts, whole = [], [], full._whole

    def count(value):
        counts.append(sum(each() is not None for each in found))
        result = whole(value)
        found.append(weakref.ref(result))
        return result

    full._whole = count
    try:
        yield counts
    finally:
        full._whole = whole


def make_data(num_samples, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, 6, generator=generator)
    return TensorDataset(x, (x[:, :3].sum(1) > 0).long() + (x[:, 3] > 1).long())


def fit(module, train, val, ckpt_path=None, max_epochs=NUM_EPOCHS, **options):
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=max_epochs,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return trainer


def run_parallel(name, folder):
    options = RUNS[name]
    L.seed_everything(3)
    module = Module(divided="tensor_parallel_size" in options)
    train, val = DataLoader(make_data(64, 1), batch_size=8, shuffle=True), DataLoader(make_data(16, 2), batch_size=8)
    trainer = fit(
        module,
        train,
        val,
        devices=dist.get_world_size(),
        strategy=PfoPipelineStrategy(num_microbatches=4, check_loss=False, **options),
    )
    validated = trainer.validate(module, val, verbose=False)
    module.wholes.append(trainer.strategy.gather_module())
    place = trainer.strategy.mesh
    local = {name: p for name, p in module.named_parameters() if not p.is_meta}
    result = {
        **module.seen,
        "validated": validated[0]["val"],
        "others_at_once": module.others_at_once,
        "wholes": [None if whole is None else seen_of_whole(whole, val) for whole in module.wholes],
        "place": [place.replica, place.rank, place.tensor_rank],
        "dimensions": list(module.device_mesh.mesh_dim_names),
        "num_held": {name: local_part(p).numel() for name, p in local.items()},
        "num_states": sum(
            local_part(state["exp_avg"]).numel() for state in trainer.optimizers[0].state.values() if "exp_avg" in state
        ),
        "weights": {
            name: p.full_tensor().tolist() if isinstance(p, DTensor) else p.tolist() for name, p in local.items()
        },
    }
    (folder / f"{name}_{dist.get_rank()}.json").write_text(json.dumps(result))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (place.replica, module.seen["batches"]))
    replicas = dict(everyone)
    return [replicas[index] for index in sorted(replicas)]


def seen_of_whole(module, val):
    """The mean loss over equal batches, and the weights, with nothing that is divided."""
    assert not any(isinstance(p, DTensor) or p.is_meta for p in module.parameters())
    with torch.no_grad():
        losses = [float(nn.functional.cross_entropy(module.model(module.stem(x)), y)) for x, y in val]
    return [sum(losses) / len(losses), {name: p.tolist() for name, p in module.named_parameters()}]


class Divided(L.Callback, InstructionListener):
    """After each forward and backward, whether the layers of the rank are divided, and have gradients that are."""

    def __init__(self):
        self.seen = {}

    def on_train_start(self, trainer, pl_module):
        self.module, self.optimizer = pl_module, trainer.optimizers[0]
        trainer.strategy.instruction_source.add_listener(self)

    def on_instruction_end(self, event):
        own = [p for p in self.module.model.parameters() if not p.is_meta]
        divided = [p for group in self.optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
        is_last = event.instruction.microbatch == 3
        found = all(isinstance(p, DTensor) for p in own), any(p.grad is not None for p in divided)
        self.seen.setdefault(f"{event.instruction.type.value}{' last' * is_last}", found)


def run_zero(folder):
    """What is divided when, and gradients, on two replicas of two stages; and losses and weights of two epochs."""
    found = {}
    for name in ZERO if CAN_SHARD else ():
        divided = Divided()
        found[name] = train_divided(4, callbacks=[divided], num_microbatches=4, data_parallel_size=2, fully_shard=name)
        found[name]["divided"] = divided.seen
    for name, shard_size in (("all", None), ("pairs", 2)) if CAN_SHARD else ():
        options = {"num_microbatches": 2, "data_parallel_size": 4, "fully_shard": "zero2", "shard_size": shard_size}
        found[name] = train_divided(4, **options)
    if CAN_SHARD:
        options = {"num_microbatches": 4, "data_parallel_size": 2, "fully_shard": "zero3"}
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        found["bf16"] = train_divided(4, check_loss=True, **options, shard_precision=precision)
        policies, fully_shard = [], fsdp.fully_shard

        def noted(*args, **kwargs):
            policies.append(type(kwargs["offload_policy"]).__name__)
            return fully_shard(*args, **kwargs)

        fsdp.fully_shard = noted
        found["offloaded"] = train_divided(4, **options, shard_offload=True)
        found["offloaded"]["policies"] = sorted(set(policies))
    (folder / f"zero_{dist.get_rank()}.json").write_text(json.dumps(found))


class Norms(L.Callback):
    """Norms of all gradients before they are clipped; neither clipping nor AdamW minds if all are twice as large."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        strategy = trainer.strategy
        by_hand = not isinstance(strategy, PfoPipelineStrategy)
        norm = torch.cat([p.grad.flatten() for p in pl_module.parameters()]).norm() if by_hand else strategy.grad_norm()
        self.seen.append(float(norm))


def train_divided(devices, callbacks=(), check_loss=False, **options):
    """By a pipeline, or without options of one by DDP."""
    L.seed_everything(3)
    module, loader = Module(divided=False), DataLoader(make_data(32, 1), batch_size=4)
    module.configure_model()  # in a fit of DDP, Lightning has other random numbers
    strategy = PfoPipelineStrategy(check_loss=check_loss, **options) if options else "ddp"
    trainer = fit(module, loader, None, devices=devices, strategy=strategy, callbacks=[*callbacks, norms := Norms()])
    held = {key: local_part(p).numel() for key, p in module.named_parameters()}
    whole = trainer.strategy.gather_module() if options else module
    weights = None if whole is None else {key: p.tolist() for key, p in whole.named_parameters()}
    return {"loss": module.seen["loss"], "norms": norms.seen, "held": held, "weights": weights}


def run_ddp(folder):
    replica = dist.get_rank()
    (folder / f"ddp_of_zero_{replica}.json").write_text(json.dumps(train_divided(2)))


def local_part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_single(folder):
    """Train on one device; a batch is what the replicas had at the same time."""
    replicas = json.loads((folder / "replicas.json").read_text())
    steps = [
        [torch.cat([torch.tensor(batch[part]) for batch in batches]) for part in range(2)]
        for batches in zip(*replicas, strict=True)
    ]
    per_epoch = len(steps) // NUM_EPOCHS
    L.seed_everything(3)
    module = Module(divided=False)
    module.train_dataloader = lambda: DataLoader(steps[module.current_epoch * per_epoch :][:per_epoch], batch_size=None)
    val = DataLoader(make_data(16, 2), batch_size=8)
    fit(module, None, val, devices=1, reload_dataloaders_every_n_epochs=1)
    del module.seen["batches"]
    weights = {name: p.tolist() for name, p in module.named_parameters()}
    (folder / "single.json").write_text(json.dumps({**module.seen, "weights": weights}))


def main(names, folder):
    for name in names:
        replicas = run_parallel(name, folder)
    if dist.get_rank() == 0:
        (folder / "replicas.json").write_text(json.dumps(replicas))


def main_of_four(folder):
    main(["sharded_zero_bubble"], folder)
    run_zero(folder)


FOLDER = Path(sys.argv[1])
run_ranks(main, 8, ["tensor", "sharded"], FOLDER)
run_ranks(main_of_four, 4, FOLDER)
run_ranks(run_ddp, 2, FOLDER)
run_ranks(run_single, 1, FOLDER)
