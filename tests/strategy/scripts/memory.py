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
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_pfo.strategy import PfoPipelineStrategy
from lightning_pfo.strategy.parallel.compat import OLDEST_FSDP
from tests.ranks import run_ranks

FOLDER = Path(sys.argv[1])
STEP = 3  # batches are compared in the first three
TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


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


class Module(L.LightningModule):
    def __init__(self, model, optimizer):
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def configure_optimizers(self):
        return self.optimizer([parameter for parameter in self.parameters() if parameter.requires_grad])


class Language(Module):
    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        if loss.isnan():  # looks at a value
            raise ValueError("NaN")
        self.log("loss", loss)
        return loss


class Images(Module):
    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)

    def forward(self, x):
        return x + self.norm(self.convolution(x)).relu()


def resnet():
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *(Block() for _ in range(4)), head)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.LSTM(48, 48, batch_first=True) for _ in range(2)), nn.Linear(48, 10)

    def forward(self, x):
        x = x.flatten(2).transpose(1, 2).repeat(1, 1, 16)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x[:, -1])


def llama(**options):
    return LlamaForCausalLM(LlamaConfig(**{**TINY, **options}))


def frozen():
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    return model


CASES = {
    "resnet, momentum, zbv": (
        Images,
        resnet,
        lambda p: optim.SGD(p, 0.1, momentum=0.9),
        {"schedule": "zbv", "num_microbatches": 6},
        {},
    ),
    "tied, bf16-mixed, AdamW of all at once, selective": (
        Language,
        lambda: llama(tie_word_embeddings=True),
        lambda p: optim.AdamW(p, foreach=True),
        {"activation_checkpointing": "selective", "offload_activations": True},
        {"precision": "bf16-mixed"},
    ),
    "frozen, bf16-true, sums in 32 bits, accumulated, Adafactor, gpipe, full": (
        Language,
        frozen,
        optim.Adafactor,
        {"schedule": "gpipe", "precise_gradients": True, "activation_checkpointing": "full"},
        {"precision": "bf16-true", "accumulate_grad_batches": 2},
    ),
    "recurrent, replicas": (Images, Recurrent, optim.Adam, {"data_parallel_size": 2}, {}),
    "divided": (Language, llama, optim.AdamW, {"data_parallel_size": 2, "fully_shard": "zero2"}, {}),
    "divided, many weights": (
        Language,
        lambda: llama(num_hidden_layers=10, hidden_size=128, intermediate_size=512),
        lambda p: optim.SGD(p, 0.1),
        {"data_parallel_size": 2, "fully_shard": "zero2", "num_microbatches": 6},
        {},
    ),
}


def run(kind, make, optimizer, options, trainer_options):
    before = {tensor.untyped_storage()._cdata: tensor for tensor in all_tensors()}
    if kind is Images:
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
    trainer.fit(module, DataLoader(data, batch_size=96 // (STEP + 1) // options.get("data_parallel_size", 1)))
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


def main():
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    can_divide = torch.__version__ >= OLDEST_FSDP["cpu"]
    cases = {name: case for name, case in CASES.items() if can_divide or "fully_shard" not in case[3]}
    results = {name: run(*case) for name, case in cases.items()}
    (FOLDER / f"rank_{dist.get_rank()}.json").write_text(json.dumps(results))


run_ranks(main, 2)
