"""Hugging Face models with the strategy's options, each run compared with one device; usage: ... FOLDER.

Writes FOLDER/RUN_DEVICES_RANK.json.
"""

import json
import sys
from pathlib import Path

import lightning as L
import torch
import transformers as hf
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Subset

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.compat.processes import OLDEST_FSDP
from tests.ranks import run_ranks
from tests.strategy import families

FOLDER = Path(sys.argv[1])
EACH_HEAD = hf.LlamaConfig(**families.LLAMA_LIKE | {"num_key_value_heads": 2})  # its heads can be divided by two
families.FAMILIES["llama"] = lambda: hf.LlamaForCausalLM(EACH_HEAD)
PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}
SHARDED = {"data_parallel_size": 2, "fully_shard": torch.__version__ >= OLDEST_FSDP["cpu"]}
RECOMPUTED = {"activation_checkpointing": True, "schedule": "interleaved_zero_bubble", "num_microbatches": 4}
RUNS = {  # family, processes, the strategy's options, precision
    "sharded_recomputed": ("llama", 4, SHARDED | RECOMPUTED, "32-true"),
    "sharded_tied": ("gpt2", 4, SHARDED, "32-true"),
    "divided": ("llama", 4, {"tensor_parallel_size": 2}, "32-true"),
    "bf16_mixed": ("gpt2", 2, {"activation_checkpointing": True}, "bf16-mixed"),
    "bf16_true": ("llama", 2, {}, "bf16-true"),
}


class Module(L.LightningModule):
    """Replicas together read what one device reads, so that no shuffling is in the way."""

    def __init__(self, family, divided=False):
        super().__init__()
        self.model = families.make(family)
        self.divided = divided
        batch = families.inputs(family, batch_size=16)
        self.data = [{name: value[index] for name, value in batch.items()} for index in range(16)]
        self.losses = []

    def configure_model(self):
        if self.divided:
            for layer in self.model.model.layers:
                parallelize_module(layer, self.device_mesh["tensor_parallel"], PLAN)

    def train_dataloader(self):
        mesh = getattr(self.trainer.strategy, "mesh", None)
        replica, number = (mesh.replica, mesh.num_replicas) if mesh is not None else (0, 1)
        return DataLoader(Subset(self.data, range(replica, 16, number)), batch_size=8 // number)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(family, devices, strategy, precision, save=None, ckpt_path=None):
    L.seed_everything(3, verbose=False)
    module = Module(family, divided="tensor_parallel_size" in strategy)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=PfoPipelineStrategy(**{"num_microbatches": 2, "check_loss": False, **strategy})
        if devices > 1
        else "auto",
        max_epochs=2 if save or ckpt_path else 1,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(save, filename="{epoch}", save_top_k=-1)] if save else [],
        enable_checkpointing=save is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        precision=precision,
    )
    trainer.fit(module, ckpt_path=ckpt_path)
    weights = {name: whole(p) for name, p in module.named_parameters() if not p.is_meta}
    dtypes = sorted({str(p.dtype) for p in module.parameters()})
    rank = torch.distributed.get_rank() if devices > 1 else 0
    return rank, {"losses": module.losses, "weights": weights, "dtypes": dtypes}


def whole(parameter):
    parameter = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return parameter.detach().double().flatten().tolist()


def main(devices, names):
    for name in names:
        family, _, strategy, precision = RUNS[name]
        save = FOLDER / f"{name}_{devices}" if name == "sharded_tied" else None
        rank, result = fit(family, devices, strategy if devices > 1 else {}, precision, save)
        (FOLDER / f"{name}_{devices}_{rank}.json").write_text(json.dumps(result))


def resume(devices, name, path):
    """Go on from a checkpoint of the model with tied weights after one epoch."""
    rank, result = fit("gpt2", devices, {}, "32-true", ckpt_path=path)
    (FOLDER / f"{name}_{rank}.json").write_text(json.dumps(result))


run_ranks(main, 1, 1, list(RUNS))
for num_ranks in (2, 4):
    run_ranks(main, num_ranks, num_ranks, [name for name, run in RUNS.items() if run[1] == num_ranks])
run_ranks(resume, 1, 1, "resumed_alone", FOLDER / "sharded_tied_4" / "epoch=0.ckpt")
run_ranks(resume, 2, 2, "resumed_by_two", FOLDER / "sharded_tied_1" / "epoch=0.ckpt")
